"""Select the recipe row for a request.

    choose_row(recipe, Request(size="8b", dtype="fp8", gpus=16, gpu="h100"), {})

Size, GPU, dtype, use case and scale are matched in this order, so that an error names the first mismatch. A
user-defined use case (long:20000/2000) takes the row with the nearest lengths. A proxy runs on any number of ranks:
`choose_layout` finds the row whose layout is scaled down for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, Literal

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, Row, expand_gpus, selector_values
from llmb.config.serialization import whole_number
from llmb.config.spec import Machine, Override
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware

SCALED_DOWN = ("training", "inference")  # kinds whose proxies run on any number of ranks
NO_ROW = "no row for "  # how the source of a borrowed row begins


def uses_proxy(proxy: str | None, gpu: str | None) -> bool:
    """Return whether a proxy runs instead of the model: if requested, and always on a CPU."""
    return proxy is not None or gpu == "cpu"


@dataclass(frozen=True, kw_only=True)
class OneRankRequest:
    """Run of one rank of the layout only."""

    rank: int | None = None  # null: one of the pipeline stage with the most work
    machine: Machine | None = None  # this machine, with its first GPU; null: it has none


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Run requested by the user, not validated yet."""

    size: str
    dtype: str
    gpus: int
    gpu: str | None = None  # null: unknown, the recipe's default
    gpu_memory_bytes: int | None = None  # as the driver reports it, of a GPU that is not in hardware.GPUS
    proxy: Literal["small", "true-width"] | None = None  # kind of proxy
    layout: str | None = (
        None  # GPU type whose layout a proxy scales down; null: that of the GPU, or the recipe's default
    )
    memory_gib: float | None = None  # memory budget of a true-width proxy; null: the GPU's memory
    one_rank: OneRankRequest | None = None  # null: all ranks run
    borrow_row: bool = False  # take the row of the GPU with the nearest memory where the recipe has none for this one
    force: bool = False  # accept a GPU type, dtype or GPU count the recipe does not list
    settings: tuple[Setting, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def uses_proxy(self) -> bool:
        return uses_proxy(self.proxy, self.gpu)


def inference_selectors(recipe: Recipe, settings: Sequence[Setting]) -> dict[str, str]:
    """Return mode and use case, which select the row of an inference recipe, with defaults."""
    if recipe.kind != "inference":
        return {}
    selectors = {"mode": "max_throughput", "use_case": "reasoning"}
    for setting in settings:
        if setting.field in selectors:
            choices = recipe.values(setting.field)
            user_defined = setting.field == "use_case" and _lengths(settings) is not None
            if setting.value not in choices and not user_defined:
                more = ["NAME:INPUT/OUTPUT"] if setting.field == "use_case" else []
                raise UnknownName(f"{setting.field} ({setting.source})", setting.value, [*choices, *more])
            selectors[setting.field] = setting.value
    return selectors


def _lengths(settings: Sequence[Setting]) -> tuple[int, int] | None:
    """Return input and output length if both are set."""
    positive = {s.field: count for s in settings if (count := whole_number(str(s.value)))}
    return (positive["isl"], positive["osl"]) if positive.keys() >= {"isl", "osl"} else None


def choose_row(recipe: Recipe, request: RunRequest, selectors: dict[str, str]) -> tuple[Row, list[Override]]:
    """Return the matching row; size, GPU, dtype, use case and scale are checked in turn to name the first mismatch."""
    matched: dict[str, Any] = {}
    proxy = request.uses_proxy
    gpu = row_gpu(recipe, request.size, request.gpu, proxy, request.force or request.borrow_row)
    user_defined = "use_case" in selectors and selectors["use_case"] not in recipe.values("use_case")
    for selector, value in [("size", request.size), ("gpu", gpu), ("dtype", request.dtype), *selectors.items()]:
        if value is None or (request.force and selector == "dtype") or (user_defined and selector == "use_case"):
            continue
        choices = recipe.values(selector, proxy, **matched)
        if value not in choices:
            context = " ".join(str(v) for v in matched.values())
            prefix = "proxy " if proxy else ""
            unknown = UnknownName(f"{prefix}{selector} of {recipe.workload} {context}".rstrip(), value, choices)
            forced = f"; --force takes a row of another GPU for {value}" if selector == "gpu" else ""
            raise ConfigError(f"{unknown}{forced}")
        matched[selector] = value
    if user_defined:
        matched["use_case"] = _nearest_use_case(recipe, recipe.matching(proxy, **matched), request)
    scale = None if proxy and recipe.kind in SCALED_DOWN else request.gpus  # null: any
    rows = recipe.matching(proxy, **matched, gpus=scale)
    row, overrides = (_best_match(rows, recipe, request), []) if rows else _extrapolate(recipe, request, matched)
    if request.gpu is not None and gpu is None and not proxy:
        overrides = [*overrides, _borrowed(row, recipe, request)]
    if user_defined:
        name, source = selectors["use_case"], "the row with the nearest lengths"
        overrides = [*overrides, Override(field="use_case", value=name, replaced=row["use_case"], source=source)]
    return row, overrides


def row_gpu(recipe: Recipe, size: str, gpu: str | None, proxy: bool, borrow: bool) -> str | None:
    """Return the GPU whose rows are selected; None: those of any GPU.

    A proxy runs anywhere. A GPU that is not in the table always borrows another one's row where the recipe has none.
    """
    if proxy or gpu is None:
        return None
    borrows = borrow or not hardware.is_listed(gpu)
    return None if borrows and gpu not in recipe.values("gpu", size=size) else gpu


def _borrowed(row: Row, recipe: Recipe, request: RunRequest) -> Override:
    """Return the departure of a run on a GPU that the recipe has no row for."""
    lender = _lender(row, recipe, request)
    near = "the nearest in memory" if _memory_distance(lender, request) is not None else "as its memory is not known"
    source = f"{NO_ROW}{request.gpu}: the settings of {lender}, {near}"
    return Override(field="gpu", value=request.gpu, replaced=lender, source=source)


def _lender(row: Row, recipe: Recipe, request: RunRequest) -> str:
    """Return the GPU of a row that is nearest in memory to this one; if that is unknown, the recipe's default."""
    return min(
        selector_values(row, "gpu"),
        key=lambda gpu: (_memory_distance(gpu, request) or 0.0, gpu != gpu_of(row, recipe)),
    )


def _memory_distance(gpu: str, request: RunRequest) -> float | None:
    """Return how far apart the memories of two GPUs are, as the logarithm of their ratio; None: one is not known."""
    memory = hardware.gpu(request.gpu or "").memory_bytes or request.gpu_memory_bytes
    row_memory = hardware.gpu(gpu).memory_bytes
    return abs(log(row_memory / memory)) if memory and row_memory else None


def _nearest_use_case(recipe: Recipe, rows: list[Row], request: RunRequest) -> str:
    """Return the use case whose lengths differ from the requested ones by the smallest factors."""
    lengths = _lengths(request.settings)
    if lengths is None:  # none is requested, and the recipe does not list the default one
        use_cases = ", ".join(map(str, recipe.values("use_case")))
        raise ConfigError(f"{recipe.workload}: give one of its use cases: {use_cases}")

    def distance(row: Row) -> float:
        cells: list[Any] = [row.get(name) for name in ("isl", "osl")]
        if not all(type(cell) is int and cell > 0 for cell in cells) or not isinstance(row.get("use_case"), str):
            raise ConfigError(f"{recipe.workload} row: expected use_case, isl and osl, got {str(row)[:60]}")
        return sum(abs(log(cell / length)) for cell, length in zip(cells, lengths, strict=True))

    return str(min(rows, key=distance)["use_case"])


def choose_layout(recipe: Recipe, request: RunRequest, selectors: dict[str, str]) -> Row | None:
    """Return the multi-GPU row from which a proxy takes its layout; None if the recipe has none."""
    listed: dict[str, Any] = {name: value for name, value in selectors.items() if value in recipe.values(name)}
    rows = [row for row in recipe.matching(size=request.size, **listed) if expand_gpus(row.get("gpus", 1))[-1] > 1]
    gpus = list(dict.fromkeys(gpu for row in rows for gpu in selector_values(row, "gpu")))
    if request.layout is not None:
        if not rows:
            raise ConfigError(f"--layout: {recipe.workload} {request.size} has no multi-GPU row; leave it out")
        if request.layout not in gpus:
            raise UnknownName(f"layout of {recipe.workload} {request.size}", request.layout, gpus)
    preferences = [request.layout, request.gpu, recipe.default_gpu, *gpus]
    if recipe.kind == "inference":  # a replica is as large as its row: prefer rows with at least as many GPUs
        large = [row for row in rows if expand_gpus(row["gpus"])[-1] >= request.gpus]
        rows = [row for row in large if request.layout in (None, *selector_values(row, "gpu"))] or rows
    return next((row for gpu in preferences for row in rows if gpu in selector_values(row, "gpu")), None)


def gpu_of(row: Row, recipe: Recipe) -> str:
    """Return the GPU of a row that lists several: the recipe's default, or the first."""
    return recipe.default_gpu if recipe.default_gpu in selector_values(row, "gpu") else selector_values(row, "gpu")[0]


def _best_match(rows: list[Row], recipe: Recipe, request: RunRequest) -> Row:
    """Return the row for the GPU, one near it in memory, or the default GPU, that agrees with most of the settings."""
    requested = {(s.field, str(s.value)) for s in request.settings}
    borrows = request.gpu is not None and not request.uses_proxy
    return max(
        rows,
        key=lambda row: (
            -(_memory_distance(_lender(row, recipe, request), request) or 0.0) if borrows else 0.0,
            recipe.default_gpu in selector_values(row, "gpu"),
            len(requested & {(k, str(v)) for k, v in row.items()}),
        ),
    )


def _extrapolate(recipe: Recipe, request: RunRequest, matched: dict[str, Any]) -> tuple[Row, list[Override]]:
    """Return a row for an unlisted GPU count: above a weak-scaling range by its rule, elsewhere only with force."""
    proxy = request.uses_proxy
    rows = recipe.matching(proxy, **matched)
    ranged = [r for r in rows if "-" in str(r.get("gpus"))]
    counts = recipe.values("gpus", proxy, **matched)
    if ranged and request.gpus > counts[-1]:
        row, source = _best_match(ranged, recipe, request), "--scale, above the recipe's range: weak scaling continued"
    elif request.force:
        row, source = _best_match(rows, recipe, request), "--force"
    else:
        more = f"; {counts[-1] * 2} and more continue the weak scaling" if ranged else ""
        choices = ", ".join(map(str, counts))
        run = f"{recipe.workload} {request.size} {request.dtype}"
        if request.gpu and not proxy:
            run += f" on {request.gpu}"
        elif proxy:
            run += " as a proxy (--proxy)"
        raise ConfigError(f"scale {request.gpus} is not listed for {run}; choices are: {choices}{more}; or add --force")
    return row, [Override(field="gpus", value=request.gpus, replaced=row.get("gpus"), source=source)]
