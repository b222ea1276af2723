"""Recipes: one workload as data. Reads recipe.yaml, selects rows, expands GPU counts.

    recipes = load_all([shipped(), Path("~/.llmb/recipes")])
    recipes["pretrain_llama3.1"].scales(size="8b", dtype="fp8", gpu="h100")  -> [8, 16, 32, 64, 128]

A folder with a recipe.yaml adds a workload; no Python is needed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.config.serialization import build, current_names, whole_number
from llmb.errors import ConfigError, UnknownName
from llmb.formats.yaml_file import parse_yaml, text_content

if TYPE_CHECKING:  # not at run time: `llmb-run list` builds no model and should not pay for the import
    from llmb.config.model import Model

Row = dict[str, Any]
POSITIVE_SIZES = {"layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"}
MOST_LAYERS, LARGEST_SIZE = 10_000, 10**9
# Keys that select a row; all others are settings of the run.
SELECTORS = ("gpu", "size", "dtype", "gpus", "mode", "use_case")
# Name of the class of spec.py with the settings of each kind of run.
SETTINGS = {"training": "Training", "inference": "Inference", "outofcore": "OutOfCore"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rows, proxies and published results of one workload."""

    workload: str
    kind: str  # training, inference or outofcore
    title: str
    default_gpu: str
    default_size: str
    default_dtype: str
    flops_convention: str = "causal"
    models: dict[str, dict[str, Any]]
    defaults: Row = field(default_factory=dict)
    rows: tuple[Row, ...]
    proxies: tuple[Row, ...] = ()
    references: tuple[Row, ...] = ()

    @property
    def sizes(self) -> list[str]:
        return list(self.models)

    def model(self, size: str, changes: dict[str, Any] | None = None) -> "Model":
        """Return the model of a size, with fields changed for a proxy; nested mappings are merged."""
        from llmb.config.model import Model

        if size not in self.models:
            raise UnknownName(f"size of {self.workload}", size, self.models)
        merged = dict(current_names("Model", self.models[size]))
        for name, value in current_names("Model", changes or {}).items():
            nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
            merged[name] = {**merged[name], **value} if nested else value
        model = build(Model, merged, f"{self.workload} model {size}")
        _check_sizes(model, f"{self.workload} model {size}")
        _check_patterns(model, f"{self.workload} model {size}")
        return model

    def matching(self, proxy: bool = False, **selectors: Any) -> list[Row]:
        """Return the rows that match all selectors; `gpus` is looked up in the row's expanded list."""
        return [row for row in (self.proxies if proxy else self.rows) if _matches(row, selectors)]

    def values(self, selector: str, proxy: bool = False, **selectors: Any) -> list[Any]:
        """Return the distinct values of one selector among matching rows, in the recipe's order."""
        values: dict[Any, None] = {}
        for row in self.matching(proxy, **selectors):
            values.update(dict.fromkeys(selector_values(row, selector)))
        return sorted(values) if selector == "gpus" else list(values)


def _check_sizes(part: Any, where: str) -> None:
    """Refuse sizes that no model has, in it or in a part of it; costs divide by them and count up to them."""
    for name, value in vars(part).items():
        if is_dataclass(value):
            _check_sizes(value, f"{where}: {name}")
        elif type(value) in (int, float):
            lowest, highest = int(name in POSITIVE_SIZES), MOST_LAYERS if "layers" in name else LARGEST_SIZE
            if not lowest <= value <= highest:
                raise ConfigError(f"{where}: {name}: {value} is out of range; it must be {lowest} to {highest:,}")


def _check_patterns(model: "Model", where: str) -> None:
    """Refuse letters that stand for no kind of layer."""
    from llmb.config.model import ATTENTION_KINDS, BLOCKS_BY_LETTER

    if model.pattern is not None and (
        len(model.pattern) < model.layers or not set(model.pattern) <= BLOCKS_BY_LETTER.keys()
    ):
        raise ConfigError(
            f"{where}: pattern: {model.layers} letters are needed: M mamba, * attention, - MLP, E experts"
        )
    if not model.attention_pattern or not set(model.attention_pattern) <= set(ATTENTION_KINDS):
        raise ConfigError(f"{where}: attention_pattern: F full, S sliding window, N full without position embedding")


def _matches(row: Row, selectors: dict[str, Any]) -> bool:
    return all(
        value is None or (selector not in row and selector == "gpu") or value in selector_values(row, selector)
        for selector, value in selectors.items()
    )


def as_listed(name: str, names: Iterable[str]) -> str:
    """Return a name as the recipe spells it, whatever its case; a name that is not listed as it is."""
    return next((listed for listed in names if listed.lower() == name.lower()), name)


def selector_values(row: Row, selector: str) -> list[Any]:
    """Return the values of a selector in a row, one or several, as a list."""
    if selector == "gpus":
        return expand_gpus(row.get("gpus", 1))
    value = row.get(selector)
    return value if isinstance(value, list) else [value]


def expand_gpus(cell: Any) -> list[int]:
    """Expand `8`, `[8, 16]` or `8-128` (8 and its doublings up to 128) to a list of GPU counts."""
    counts = cell if isinstance(cell, list) else [cell]
    if isinstance(cell, str):
        first, dash, last = (whole_number(part) or part for part in cell.partition("-"))
        if dash and isinstance(first, int) and isinstance(last, int) and first <= last:
            counts = [first]
            while counts[-1] * 2 <= last:
                counts.append(counts[-1] * 2)
    if counts and all(type(count) is int and 0 < count < 2**53 for count in counts):
        return counts
    raise ConfigError(f"gpus: expected a number above 0, a list or a range such as 8-128, got {str(cell)[:60]!r}")


def per_gpus(cell: Any, gpus: int, name: str) -> int:
    """Evaluate a weak-scaling cell (`GPUs/2`, `GPUs*16`, `GPUs` or a number) for a GPU count."""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return cell
    text = str(cell).replace(" ", "")
    factor = text[5:]
    if text == "GPUs":
        return gpus
    count = whole_number(factor)
    if text.startswith(("GPUs*", "GPUs/")) and count:
        if text[4] == "*":
            return gpus * count
        if gpus % count == 0:
            return gpus // count
        raise ConfigError(f"{name}: {text} is not whole for {gpus} GPUs; use a multiple of {factor} GPUs")
    raise ConfigError(f"{name}: expected a number, GPUs*N or GPUs/N, got {str(cell)[:60]!r}")


def load(path: Path) -> Recipe:
    """Load one recipe.yaml; errors name the file and the row."""
    return _recipe(path, text_content(path))


@lru_cache(maxsize=64)
def _recipe(path: Path, content: bytes) -> Recipe:
    """Parse a recipe once as long as its file stays the same: that is half the time of a prediction."""
    data = parse_yaml(path, content, "a recipe: workload, kind, models, rows")
    recipe = build(Recipe, data, str(path))
    for section in ("rows", "proxies", "references"):
        for number, row in enumerate(getattr(recipe, section), 1):
            if not isinstance(row, dict):
                raise ConfigError(f"{path}: {section}[{number}] is not a mapping")
            _check_selectors(row, f"{path}: {section}[{number}]")
            for size in selector_values(row, "size"):
                if size not in recipe.models:
                    raise UnknownName(f"size in {path}: {section}[{number}]", size, recipe.models)
    if recipe.kind not in SETTINGS:
        raise UnknownName(f"kind in {path}:", recipe.kind, SETTINGS)
    if recipe.default_size not in recipe.models:
        raise UnknownName(f"default_size in {path}:", recipe.default_size, recipe.models)
    return _with_current_names(recipe)


def _check_selectors(row: Row, where: str) -> None:
    """Refuse cells that select no row: what they select is looked up in sets and sorted."""
    for selector in SELECTORS:
        if selector == "gpus":
            try:
                expand_gpus(row.get(selector, 1))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        elif selector in row and not all(isinstance(value, str) for value in selector_values(row, selector)):
            raise ConfigError(f"{where}: {selector}: expected text or a list of texts, got {str(row[selector])[:60]!r}")


def _with_current_names(recipe: Recipe) -> Recipe:
    """Return the recipe with settings that once had other names under their current names."""
    settings = SETTINGS.get(recipe.kind, "")

    def renamed(row: Row) -> Row:
        row = current_names("Precision", current_names(settings, row))
        nested = row.get("true_width")
        return row | {"true_width": renamed(nested)} if isinstance(nested, dict) else row

    return replace(
        recipe,
        defaults=renamed(recipe.defaults),
        rows=tuple(map(renamed, recipe.rows)),
        proxies=tuple(map(renamed, recipe.proxies)),
        references=tuple(map(renamed, recipe.references)),
    )


def shipped() -> Path:
    """Return the folder of the recipes that ship with llmb."""
    return Path(__file__).parent.parent / "recipes"


def paths(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.glob("*/recipe.yaml"))


def load_all(folders: Iterable[Path], report: Callable[[str], None] | None = None) -> dict[str, Recipe]:
    """Load all recipes by workload; one in a later folder replaces an earlier one of the same name.

    `report` is called with what is wrong with a recipe, which is left out; without it the first wrong one is raised.
    """
    recipes: dict[str, Recipe] = {}
    for path in paths(folders):
        try:
            recipe = load(path)
            recipes[recipe.workload] = recipe
        except ConfigError as error:
            if report is None:
                raise
            report(str(error))
            recipes.pop(path.parent.name, None)  # not the recipe that this one was written to replace
    return recipes
