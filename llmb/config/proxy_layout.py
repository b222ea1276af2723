"""The layout of a real row on the ranks that a stand-in has, and how long it runs there.

    scale_down(cells, recipe, request, selectors)  ->  "layout tp8 pp2 ep8 of 16 x h100 as"

`shrunk_layout.py` has the rule. Where a recipe prints no layout for several GPUs, training has replicas and serving splits
tensors.
"""

from llmb.config.parallel_layout import check_ranks, spelled
from llmb.config.proxy import UNIT
from llmb.config.recipe import Recipe, Row, expand_gpus
from llmb.config.row_selection import SCALED_DOWN, Request, choose_layout, gpu_of
from llmb.config.serialization import build, hints
from llmb.config.shrunk_layout import shrunk
from llmb.config.spec import Parallel
from llmb.errors import ConfigError

FEWEST_STEPS = 8  # of a stand-in on many ranks of a CPU, which share its cores
ROUNDS = 2  # micro-batches a stage of a stand-in's pipeline: gradients accumulate, and every stage is busy for a while
ROUNDS_SERVED = 2  # times its concurrency in requests, of a stand-in on many ranks of a CPU
LAYOUT = ("fsdp", "tp", "pp", "cp", "ep", "etp", "vp")


def scale_down(cells: Row, recipe: Recipe, request: Request, selectors: dict[str, str]) -> str | None:
    """Give a stand-in on several ranks the layout of a real row, scaled down; says whose it is."""
    if request.layout is not None and not (request.stands_in and recipe.kind in SCALED_DOWN):
        raise ConfigError("--layout has no effect here: it chooses what a stand-in scales down; add --proxy")
    if not request.stands_in or recipe.kind not in SCALED_DOWN:
        return None
    row = choose_layout(recipe, request, selectors)
    if request.gpus < 2:
        return None
    real, gpus = Parallel(tp=request.gpus if recipe.kind == "inference" else 1), 1
    if row is not None:
        degrees = {k: v for k, v in row.items() if k in hints(Parallel) and k != "dp"}
        gpus = expand_gpus(row["gpus"])[0]
        real = check_ranks(build(Parallel, degrees, f"{recipe.workload} row"), gpus)
    here = shrunk(real, request.gpus)
    cells |= {name: getattr(here, name) for name in LAYOUT}
    if recipe.kind == "inference":
        _deal_requests(cells, here, row or {})
    if request.gpu in (None, "cpu"):
        _shorten(cells, request.gpus)
    if row is None:
        return "no layout for several GPUs is published, here"
    attention = " with attention data parallelism" if cells.get("attention_dp") else ""
    return f"layout {spelled(real)} of {gpus} x {request.layout or gpu_of(row, recipe)}{attention} as"


def _deal_requests(cells: Row, here: Parallel, row: Row) -> None:
    """Attention data parallelism as in the row: each rank takes its part of the stand-in's batch."""
    cells["attention_dp"] = bool(row.get("attention_dp")) and here.tp > 1
    if cells["attention_dp"]:
        cells["max_batch_size"] = max(1, cells["max_batch_size"] // here.tp)


def _shorten(cells: Row, ranks: int) -> None:
    """Many ranks share the cores of one CPU."""
    if "steps" in cells:
        cells["steps"] = max(FEWEST_STEPS, cells["steps"] // ranks)
        cells["window"] = [cells["steps"] // 4 + 1, cells["steps"]]
    else:
        cells["num_requests"] = max(ROUNDS_SERVED * cells["concurrency"], cells["num_requests"] // ranks)


def fit_to_ranks(cells: Row, parallel: Parallel, asked: set[str]) -> None:
    """Sequence and batch of a stand-in on several ranks, where the user does not ask for his own."""
    if "seqlen" not in asked:  # each rank's share of the tokens in units
        unit = UNIT * parallel.tp * parallel.cp
        cells["seqlen"] = -(-cells["seqlen"] // unit) * unit
    if "gbs" not in asked:
        cells["gbs"] = cells["mbs"] * ROUNDS * parallel.pp * parallel.dp
