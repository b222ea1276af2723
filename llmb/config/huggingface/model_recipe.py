"""Recipe of a model that has none: one row to start from, and one for a CPU or a proxy.

    recipe = model_recipe(load_hf_config(Path("Qwen3-8B")), "train", "h200", 8)

The row has a plain layout, all ranks data-parallel; what fits is chosen later (`llmb/cli/model_run/fitted_row.py`).
"""

from dataclasses import fields
from typing import Any

from llmb.config.model import Model
from llmb.config.parallel_layout import check_serving
from llmb.config.recipe import Recipe, Row
from llmb.config.serialization import to_plain
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import lacks_fp8
from llmb.perfmodel.params import FP8_BLOCK, MXFP4_GROUP, parameters

KINDS = {"train": "training", "serve": "inference", "offload": "outofcore"}  # of a recipe, by task
DTYPES = ["bf16", "fp32", "fp8"]
EXPERT_DTYPES = ["mxfp4"]  # to serve a mixture of experts
PUBLISHED_DTYPES = {("serve", "gpt_oss"): "mxfp4"}  # by task and architecture, where it is not bf16
CPU_PARAMETERS = 50_000_000  # a larger model runs as a small proxy on a CPU, where it would take minutes a step
DEFAULTS: dict[str, Row] = {
    "train": {"seqlen": 4096, "steps": 50, "window": [35, 44], "profile_start": 45, "profile_stop": 50},
    "serve": {"streaming": True, "chunked_prefill": True, "pp": 1, "profile_start": 0, "profile_stop": 1},
    "offload": {"steps": 7, "window": [3, 7], "time_limit_s": 3600, "profile_start": 6, "profile_stop": 7},
}
SERVED: Row = {"mode": "max_throughput", "use_case": "reasoning"}
ROWS: dict[str, Row] = {
    "train": {"fsdp": False, "tp": 1, "pp": 1, "cp": 1, "vp": None, "mbs": 1, "gbs": "GPUs*8", "recompute_layers": 0},
    "serve": SERVED
    | {"isl": 1000, "osl": 1000, "max_batch_size": 1, "concurrency": 1, "max_num_tokens": 8192, "kv_fraction": 0.9},
    "offload": {"seqlen": 8192},
}
# In seconds on any machine.
SMALL_ROWS: dict[str, Row] = {
    "train": {"seqlen": 128, "mbs": 2, "gbs": 4, "steps": 40, "window": [11, 40]},
    "serve": SERVED
    | {"isl": 64, "osl": 32, "max_batch_size": 16, "concurrency": 16, "max_num_tokens": 256, "num_requests": 32,
       "kv_fraction": 0.1},
    "offload": {"seqlen": 256, "gbs": 2, "host_gib": 1.0, "device_gib": 1.0},
}  # fmt: skip


def model_recipe(
    model: Model, task: str, gpu: str, gpus: int, weights: str | None = None, budgets: Row | None = None
) -> Recipe:
    """Return a recipe with this model only; `weights`: a folder, of engines that read one; `budgets`: memory in GiB."""
    size = model_size(model)
    dtypes = DTYPES + EXPERT_DTYPES * (task == "serve" and model.experts is not None)
    row = {"gpu": gpu, "size": size, "dtype": dtypes, "gpus": gpus, **ROWS[task], **(budgets or {})}
    small = {"size": size, "dtype": dtypes, "gpus": 1, **SMALL_ROWS[task]}
    read = {} if weights is None else {"weights": weights}
    row |= read | ({**_serving_layout(model, gpus), "num_requests": 1} if task == "serve" else {})
    if parameters(model) <= CPU_PARAMETERS:
        small |= {"model": {}, **read}  # the model itself
    return Recipe(
        workload=f"{task}_{model.name}",
        kind=KINDS[task],
        title=f"{model.name}, read from its config.json",
        default_gpu=gpu,
        default_size=size,
        default_dtype=published_dtype(model, task),
        models={size: model_fields(model)},
        defaults=DEFAULTS[task],
        rows=(row,),
        proxies=(small,),
    )


def _serving_layout(model: Model, gpus: int) -> Row:
    """Return tensor parallelism over as many GPUs as the model can be split over, and a pipeline of such groups."""
    for tp in range(gpus, 0, -1):
        layout = Parallel(tp=tp, pp=gpus // tp, ep=_expert_ranks(model, tp))
        if layout.world_size == gpus and _can_serve(model, layout):
            return {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    return {"tp": gpus, "pp": 1}  # refused by name when the run is resolved


def _expert_ranks(model: Model, tp: int) -> int:
    """Return the fewest groups of ranks with different experts whose shards of an expert can be quantized."""
    experts = model.experts
    if experts is None:
        return 1
    whole = next((block for block in (FP8_BLOCK, MXFP4_GROUP) if experts.ffn % block == 0), 1)
    degrees = (ep for ep in range(1, tp + 1) if tp % ep == 0 and experts.count % ep == 0)
    return next((ep for ep in degrees if experts.ffn % (tp // ep * whole) == 0), 1)


def _can_serve(model: Model, layout: Parallel) -> bool:
    try:
        check_serving(layout, model, attention_dp=False)
    except ConfigError:
        return False
    return True


def published_dtype(model: Model, task: str, stored: str | None = None, gpu: str = "") -> str:
    """Return the dtype of a run that names none: served weights stay as they are stored, where the GPU computes so."""
    is_kept = task == "serve" and stored == "fp8" and not lacks_fp8(gpu)
    return "fp8" if is_kept else PUBLISHED_DTYPES.get((task, model.architecture), "bf16")


def model_size(model: Model) -> str:
    """Return the number of parameters as sizes are written, with three digits: 8.19b, 135m."""
    count = float(f"{parameters(model):.3g}")
    return f"{count / 1e9:g}b" if count >= 1e9 else f"{count / 1e6:g}m"


def model_fields(model: Model) -> dict[str, Any]:
    """Return the fields of a model as a recipe has them: without those at their default."""
    defaults = {field.name: field.default for field in fields(Model)}
    return {name: value for name, value in to_plain(model).items() if getattr(model, name) != defaults[name]}
