"""Recipes: one workload as data. Reads recipe.yaml, selects rows, expands GPU counts.

    recipes = load_all([shipped(), Path("~/.llmb/recipes")])
    recipes["pretrain_llama3.1"].scales(size="8b", dtype="fp8", gpu="h100")  -> [8, 16, 32, 64, 128]

A folder with a recipe.yaml adds a workload; no Python is needed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.config.serialization import build, current_names
from llmb.errors import ConfigError, UnknownName

if TYPE_CHECKING:  # not at run time: `llmb-run list` builds no model and should not pay for the import
    from llmb.config.spec import Model

Row = dict[str, Any]
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
        from llmb.config.spec import Model

        if size not in self.models:
            raise UnknownName(f"size of {self.workload}", size, self.models)
        merged = dict(current_names("Model", self.models[size]))
        for name, value in current_names("Model", changes or {}).items():
            nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
            merged[name] = {**merged[name], **value} if nested else value
        return build(Model, merged, f"{self.workload} model {size}")

    def matching(self, proxy: bool = False, **selectors: Any) -> list[Row]:
        """Return the rows that match all selectors; `gpus` is looked up in the row's expanded list."""
        return [row for row in (self.proxies if proxy else self.rows) if _matches(row, selectors)]

    def values(self, selector: str, proxy: bool = False, **selectors: Any) -> list[Any]:
        """Return the distinct values of one selector among matching rows, in the recipe's order."""
        values: dict[Any, None] = {}
        for row in self.matching(proxy, **selectors):
            values.update(dict.fromkeys(selector_values(row, selector)))
        return sorted(values) if selector == "gpus" else list(values)


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
    if isinstance(cell, int) and not isinstance(cell, bool):
        return [cell]
    if isinstance(cell, list) and all(isinstance(n, int) for n in cell):
        return cell
    if isinstance(cell, str):
        first, dash, last = cell.partition("-")
        if dash and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last):
            counts = [int(first)]
            while counts[-1] * 2 <= int(last):
                counts.append(counts[-1] * 2)
            return counts
    raise ConfigError(f"gpus: expected a number, a list or a range such as 8-128, got {cell!r}")


def per_gpus(cell: Any, gpus: int, name: str) -> int:
    """Evaluate a weak-scaling cell (`GPUs/2`, `GPUs*16`, `GPUs` or a number) for a GPU count."""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return cell
    text = str(cell).replace(" ", "")
    factor = text[5:]
    if text == "GPUs":
        return gpus
    if text.startswith(("GPUs*", "GPUs/")) and factor.isdigit() and int(factor) > 0:
        if text[4] == "*":
            return gpus * int(factor)
        if gpus % int(factor) == 0:
            return gpus // int(factor)
        raise ConfigError(f"{name}: {text} is not whole for {gpus} GPUs; use a multiple of {factor} GPUs")
    raise ConfigError(f"{name}: expected a number, GPUs*N or GPUs/N, got {cell!r}")


def load(path: Path) -> Recipe:
    """Load one recipe.yaml; errors name the file and the row."""
    return _recipe(path, _content(path))


@lru_cache(maxsize=64)
def _recipe(path: Path, content: bytes) -> Recipe:
    """Parse a recipe once as long as its file stays the same: that is half the time of a prediction."""
    data = _parse_yaml(path, content, "a recipe: workload, kind, models, rows")
    recipe = build(Recipe, data, str(path))
    for section in ("rows", "proxies", "references"):
        for number, row in enumerate(getattr(recipe, section), 1):
            if not isinstance(row, dict):
                raise ConfigError(f"{path}: {section}[{number}] is not a mapping")
            for size in [row.get("size")] if not isinstance(row.get("size"), list) else row["size"]:
                if size not in recipe.models:
                    raise UnknownName(f"size in {path}: {section}[{number}]", size, recipe.models)
    return _with_current_names(recipe)


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


def load_yaml(path: Path, expected: str, loader: Any = None) -> Any:
    """Parse a YAML file; errors name the file, the line and the problem, or what was expected in an empty file."""
    return _parse_yaml(path, _content(path), expected, loader)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _parse_yaml(path: Path, content: bytes, expected: str, loader: Any = None) -> Any:
    import yaml

    try:
        data = yaml.load(content, Loader=loader or getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from error
    except (ValueError, RecursionError) as error:  # an impossible date, a control character, absurd nesting
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if data is None:
        raise ConfigError(f"{path} is empty; expected {expected}")
    return data


def shipped() -> Path:
    """Return the folder of the recipes that ship with llmb."""
    return Path(__file__).parent.parent / "recipes"


def paths(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.glob("*/recipe.yaml"))


def load_all(folders: Iterable[Path]) -> dict[str, Recipe]:
    """Load all recipes by workload; one in a later folder replaces an earlier one of the same name."""
    recipes = (load(path) for path in paths(folders))
    return {recipe.workload: recipe for recipe in recipes}
