"""Parallel layout of a recipe row, scaled down to the ranks of a proxy.

    scale_down(settings, recipe, request, selectors)  ->  "layout tp8 pp2 ep8 of 16 x h100 as"
    shrink_layout(Parallel(tp=8, pp=8, cp=2, vp=8, dp=8), 16)  ->  tp 2, pp 2, cp 2, vp 2, dp 2

Each dimension that is split in the recipe stays split, as far as there are ranks. Ranks are assigned one prime factor
at a time, largest first. A factor goes to a dimension whose degree stays a divisor of the recipe's degree: to the first
of tp, pp, cp, dp that is not split yet, so that with too few ranks dp is dropped first, then cp, then pp; once all are
split, to the one furthest below the recipe. A factor that divides no degree multiplies dp. The ranks of a pipeline
stage are assigned to experts by the same rule, in the order ep, etp, replicas. On as many ranks as the recipe has, the
dimensions are those of the recipe. Where a recipe lists no multi-GPU layout, training uses dp and serving uses tp.
"""

from collections.abc import Set
from dataclasses import replace

from llmb.config.parallel_layout import check_ranks, format_layout
from llmb.config.proxy import ALIGNMENT
from llmb.config.recipe import Recipe, Row, expand_gpus
from llmb.config.row_selection import SCALED_DOWN, RunRequest, choose_layout, gpu_of
from llmb.config.serialization import build, field_types
from llmb.config.spec import Parallel
from llmb.errors import ConfigError

MIN_STEPS = 8  # of a proxy on many ranks of a CPU, which share its cores
MICRO_BATCHES_PER_STAGE = 2  # of a proxy: gradients accumulate, and every pipeline stage is busy for a while
MIN_REQUEST_ROUNDS = 2  # requests / concurrency of a proxy on many ranks of a CPU
VIRTUAL_STAGES = 2  # they need layers, of which a small model has few, but no ranks
LAYOUT = ("fsdp", "tp", "pp", "cp", "ep", "etp", "vp")


def scale_down(settings: Row, recipe: Recipe, request: RunRequest, selectors: dict[str, str]) -> str | None:
    """Put the scaled-down layout of a real row into the settings of a multi-rank proxy; return its description."""
    if request.layout is not None and not (request.uses_proxy and recipe.kind in SCALED_DOWN):
        raise ConfigError("--layout has no effect here: it chooses the layout that a proxy scales down; add --proxy")
    if not request.uses_proxy or recipe.kind not in SCALED_DOWN:
        return None
    row = choose_layout(recipe, request, selectors)
    if request.gpus < 2:
        return None
    real, gpus = Parallel(tp=request.gpus if recipe.kind == "inference" else 1), 1
    if row is not None:
        degrees = {k: v for k, v in row.items() if k in field_types(Parallel) and k != "dp"}
        gpus = next(count for count in expand_gpus(row["gpus"]) if count > 1)
        real = check_ranks(build(Parallel, degrees, f"{recipe.workload} row"), gpus)
    layout = shrink_layout(real, request.gpus)
    settings |= {name: getattr(layout, name) for name in LAYOUT}
    if recipe.kind == "inference":
        _split_requests(settings, layout, row or {})
    if request.gpu in (None, "cpu"):
        _shorten(settings, request.gpus)
    if row is None:
        return "no layout for several GPUs is published, here"
    if layout == real and gpu_of(row, recipe) == "cpu":  # a model that runs whole here
        return None
    attention = " with attention data parallelism" if settings.get("attention_dp") else ""
    return f"layout {format_layout(real)} of {gpus} x {request.layout or gpu_of(row, recipe)}{attention} as"


def changed_layout(description: str, overridden: Set[str]) -> str:
    """Return the description of a layout that is not the row's where settings changed it."""
    if description.endswith(" as") and not overridden.isdisjoint(LAYOUT):
        return f"{description.removesuffix(' as').replace('layout', 'layout changed from', 1)} to"
    return description


def shrink_layout(real: Parallel, ranks: int) -> Parallel:
    """Return the layout of `real` scaled to this many ranks."""
    dense = _assign_ranks(ranks, {"tp": real.tp, "pp": real.pp, "cp": real.cp, "dp": real.dp})
    replicas = max(1, real.world_size // real.pp // (real.ep * real.etp))
    expert = _assign_ranks(ranks // dense["pp"], {"ep": real.ep, "etp": real.etp, "replicas": replicas})
    return replace(
        real,
        tp=dense["tp"],
        pp=dense["pp"],
        cp=dense["cp"],
        dp=dense["dp"],
        ep=expert["ep"],
        etp=expert["etp"],
        vp=VIRTUAL_STAGES if dense["pp"] > 1 and (real.vp or 1) > 1 else None,
        fsdp=real.fsdp and dense["dp"] * dense["cp"] > 1,
    )


def _assign_ranks(ranks: int, degrees: dict[str, int]) -> dict[str, int]:
    """Split ranks over dimensions in order of preference; the last one takes factors that fit no other."""
    assigned = dict.fromkeys(degrees, 1)
    for factor in _prime_factors(ranks):
        fitting = [name for name in degrees if degrees[name] % (assigned[name] * factor) == 0]
        unsplit = [name for name in fitting if assigned[name] == 1]
        furthest = max(fitting, key=lambda name: degrees[name] // assigned[name], default=list(degrees)[-1])
        assigned[unsplit[0] if unsplit else furthest] *= factor
    return assigned


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors, largest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]


def _split_requests(settings: Row, layout: Parallel, row: Row) -> None:
    """Use attention data parallelism as in the row: each rank takes its part of the proxy's batch."""
    settings["attention_dp"] = bool(row.get("attention_dp")) and layout.tp > 1
    if settings["attention_dp"]:
        settings["max_batch_size"] = max(1, settings["max_batch_size"] // layout.tp)


def _shorten(settings: Row, ranks: int) -> None:
    """Run fewer steps or requests, as many ranks share the cores of one CPU."""
    if "steps" in settings:
        settings["steps"] = max(MIN_STEPS, settings["steps"] // ranks)
        settings["window"] = [settings["steps"] // 4 + 1, settings["steps"]]
    else:
        fewest = MIN_REQUEST_ROUNDS * settings["concurrency"]
        settings["num_requests"] = max(fewest, settings["num_requests"] // ranks)


def fit_to_ranks(settings: Row, parallel: Parallel, overridden: set[str]) -> None:
    """Fit sequence length and batch of a multi-rank proxy to its layout, except where the user sets them."""
    if "seqlen" not in overridden:  # each rank's tokens in multiples of the alignment
        unit = ALIGNMENT * parallel.tp * parallel.cp
        settings["seqlen"] = -(-settings["seqlen"] // unit) * unit
    if "gbs" not in overridden:
        settings["gbs"] = settings["mbs"] * MICRO_BATCHES_PER_STAGE * parallel.pp * parallel.dp
