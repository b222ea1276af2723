"""Which row of a recipe a request means.

    choose_row(recipe, Request(size="8b", dtype="fp8", gpus=16, gpu="h100"), {})

Size, GPU, dtype, use case and scale are looked at in this order, so that an error names the first that does not fit.
A use case of the user's own (long:20000/2000) takes the row whose lengths are nearest. A stand-in runs on any number of
ranks: `choose_layout` finds the row whose layout is scaled down for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import Any, Literal

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, Row, expand_gpus, listed
from llmb.config.spec import Override
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware

SCALED_DOWN = ("training", "inference")  # kinds whose stand-ins run on any number of ranks


def stands_in(proxy: str | None, gpu: str | None) -> bool:
    """Whether a stand-in runs instead of the model: asked for, or on a CPU, which never runs the real thing."""
    return proxy is not None or gpu == "cpu"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, before it is known to make sense."""

    size: str
    dtype: str
    gpus: int
    gpu: str | None = None  # null: unknown here, the recipe's choice
    proxy: Literal["small", "true-width"] | None = None  # a stand-in, and of which kind
    layout: str | None = None  # GPU type whose layout a stand-in scales down; null: the GPU's or the recipe's
    memory_gib: float | None = None  # what a stand-in of true width may fill; null: the GPU's memory
    force: bool = False  # accept a dtype or GPU count the recipe does not list
    settings: tuple[Setting, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def stands_in(self) -> bool:
        return stands_in(self.proxy, self.gpu)


def inference_selectors(recipe: Recipe, wishes: Sequence[Setting]) -> dict[str, str]:
    """Mode and use case choose the row of an inference recipe; they are wishes with a default."""
    if recipe.kind != "inference":
        return {}
    chosen = {"mode": "max_throughput", "use_case": "reasoning"}
    for wish in wishes:
        if wish.field in chosen:
            choices = recipe.values(wish.field)
            own = wish.field == "use_case" and _lengths(wishes) is not None
            if wish.value not in choices and not own:
                more = ["NAME:INPUT/OUTPUT"] if wish.field == "use_case" else []
                raise UnknownName(f"{wish.field} ({wish.source})", wish.value, [*choices, *more])
            chosen[wish.field] = wish.value
    return chosen


def _lengths(wishes: Sequence[Setting]) -> tuple[int, int] | None:
    """Input and output length, where both are asked for."""
    asked = {wish.field: str(wish.value) for wish in wishes if str(wish.value).isdigit() and int(wish.value) > 0}
    return (int(asked["isl"]), int(asked["osl"])) if asked.keys() >= {"isl", "osl"} else None


def choose_row(recipe: Recipe, request: Request, selectors: dict[str, str]) -> tuple[Row, list[Override]]:
    """The one row that fits; walks size, GPU, dtype, use case and scale so that the error names the first misfit."""
    wanted: dict[str, Any] = {}
    proxy = request.stands_in
    if request.gpu is not None:
        hardware.gpu(request.gpu)
    gpu = None if proxy else request.gpu
    own_case = "use_case" in selectors and selectors["use_case"] not in recipe.values("use_case")
    for selector, value in [("size", request.size), ("gpu", gpu), ("dtype", request.dtype), *selectors.items()]:
        if value is None or (request.force and selector == "dtype") or (own_case and selector == "use_case"):
            continue
        choices = recipe.values(selector, proxy, **wanted)
        if value not in choices:
            about = " ".join(str(v) for v in wanted.values())
            what = "stand-in " if proxy else ""
            raise UnknownName(f"{what}{selector} of {recipe.workload} {about}".rstrip(), value, choices)
        wanted[selector] = value
    if own_case:
        wanted["use_case"] = _like(recipe.matching(proxy, **wanted), request)
    scale = None if proxy and recipe.kind in SCALED_DOWN else request.gpus  # null: any
    rows = recipe.matching(proxy, **wanted, gpus=scale)
    row, beyond = (_nearest(rows, recipe, request), []) if rows else _beyond_the_table(recipe, request, wanted)
    if own_case:
        own, near = selectors["use_case"], "the row with the nearest lengths"
        beyond = [*beyond, Override(field="use_case", value=own, replaced=row["use_case"], source=near)]
    return row, beyond


def _like(rows: list[Row], request: Request) -> str:
    """The use case whose lengths differ by the smallest factors from those asked for."""
    isl, osl = _lengths(request.settings) or (inf, inf)
    return min(rows, key=lambda row: abs(log(row["isl"] / isl)) + abs(log(row["osl"] / osl)))["use_case"]


def choose_layout(recipe: Recipe, request: Request, selectors: dict[str, str]) -> Row | None:
    """The row for several GPUs that a stand-in takes its layout from; null where the recipe prints none."""
    known: dict[str, Any] = {name: value for name, value in selectors.items() if value in recipe.values(name)}
    rows = [row for row in recipe.matching(size=request.size, **known) if expand_gpus(row.get("gpus", 1))[-1] > 1]
    gpus = list(dict.fromkeys(gpu for row in rows for gpu in listed(row, "gpu")))
    if request.layout is not None:
        if not rows:
            raise ConfigError(f"--layout: {recipe.workload} {request.size} has no row for several GPUs; leave it out")
        if request.layout not in gpus:
            raise UnknownName(f"layout of {recipe.workload} {request.size}", request.layout, gpus)
    wishes = [request.layout, request.gpu, recipe.default_gpu, *gpus]
    if recipe.kind == "inference":  # a replica is as large as its row: one on at least so many GPUs, if there is one
        large = [row for row in rows if expand_gpus(row["gpus"])[-1] >= request.gpus]
        rows = [row for row in large if request.layout in (None, *listed(row, "gpu"))] or rows
    return next((row for wish in wishes for row in rows if wish in listed(row, "gpu")), None)


def gpu_of(row: Row, recipe: Recipe) -> str:
    """The GPU of a row that lists several: the recipe's own choice, or the first."""
    return recipe.default_gpu if recipe.default_gpu in listed(row, "gpu") else listed(row, "gpu")[0]


def _nearest(rows: list[Row], recipe: Recipe, request: Request) -> Row:
    """Of several rows that fit: the recipe's own GPU first, then the one that agrees with most of the settings."""
    asked = {(s.field, str(s.value)) for s in request.settings}
    return max(
        rows,
        key=lambda row: (recipe.default_gpu in listed(row, "gpu"), len(asked & {(k, str(v)) for k, v in row.items()})),
    )


def _beyond_the_table(recipe: Recipe, request: Request, wanted: dict[str, Any]) -> tuple[Row, list[Override]]:
    """A GPU count no row lists: above a weak-scaling range it follows the rule, elsewhere only with force."""
    proxy = request.stands_in
    rows = recipe.matching(proxy, **wanted)
    ranged = [r for r in rows if "-" in str(r.get("gpus"))]
    counts = recipe.values("gpus", proxy, **wanted)
    if ranged and request.gpus > counts[-1]:
        row, source = _nearest(ranged, recipe, request), "--scale, above the recipe's range: weak scaling continued"
    elif request.force:
        row, source = _nearest(rows, recipe, request), "--force"
    else:
        more = f"; {counts[-1] * 2} and more continue the weak scaling" if ranged else ""
        listed = ", ".join(map(str, counts))
        about = f"{recipe.workload} {request.size} {request.dtype}"
        if request.gpu and not proxy:
            about += f" on {request.gpu}"
        elif proxy:
            about += " as a stand-in (--proxy)"
        raise ConfigError(f"scale {request.gpus} is not listed for {about}; choices are: {listed}{more}")
    return row, [Override(field="gpus", value=request.gpus, replaced=row.get("gpus"), source=source)]
