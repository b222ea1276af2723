"""Layout and batch of a model without a recipe: the fastest layout that fits, by prediction and by the memory model."""

from dataclasses import replace
from typing import Any

from llmb.config.recipe import Recipe, Row
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import lacks_fp8, memory_bytes
from llmb.perfmodel.memory_fit import misfit, recomputed_layers_to_fit
from llmb.perfmodel.serving_capacity import cache_capacity, free_bytes

MOST_REQUESTS = 512  # at once: beyond, time per token grows faster than throughput
WAVES = 3  # requests of a benchmark, as a multiple of those at once
LAYOUT = ("tp", "pp", "cp", "vp", "ep", "etp", "fsdp")


def fitted_recipe(recipe: Recipe, request: RunRequest) -> Recipe:
    """Return the recipe with a row whose settings suit the request; a proxy needs none."""
    if request.uses_proxy or recipe.kind == "outofcore":
        return recipe
    config = resolve(recipe, request)
    chosen = _training_row(config, request) if recipe.kind == "training" else _serving_row(config)
    return replace(recipe, rows=(recipe.rows[0] | chosen,))


def _training_row(config: RunConfig, request: RunRequest) -> Row:
    """Search layouts where the GPU's speed is known; elsewhere recompute as many layers as needed."""
    from llmb.perfmodel.step_time.cluster_fabric import FABRICS
    from llmb.perfmodel.step_time.step_setup import setup_of
    from llmb.perfmodel.tune.fixed_fields import DIMENSIONS
    from llmb.perfmodel.tune.layout_search import search_layouts
    from llmb.perfmodel.tune.native_layouts import native_config, native_room, runs_natively

    assert isinstance(config.workload, Training)
    if config.machine.gpu not in FABRICS:
        return _data_parallel_row(config)
    fixed = {setting.field: _current(config, setting.field) for setting in request.settings}
    fixed = {name: value for name, value in fixed.items() if name in DIMENSIONS}
    search = search_layouts(setup_of(config), fixed, native_room(config), runs_natively(config))
    if not search.candidates:
        return _data_parallel_row(config)
    best = native_config(config, search.candidates[0].setup)
    return _row_of(best)


def _data_parallel_row(config: RunConfig) -> Row:
    """Return the plain layout, sharded over several GPUs, with the fewest recomputed layers that fit."""
    sharded = replace(config, parallel=replace(config.parallel, fsdp=config.machine.gpus > 1))
    layers = recomputed_layers_to_fit(sharded) if misfit(sharded) else 0
    if layers is None:  # refused by name when the run is checked against memory
        layers = config.model.layers
    assert isinstance(sharded.workload, Training)
    return _row_of(replace(sharded, workload=replace(sharded.workload, recompute_layers=layers)))


def _row_of(config: RunConfig) -> Row:
    work = config.workload
    assert isinstance(work, Training)
    row: dict[str, Any] = {name: getattr(config.parallel, name) for name in LAYOUT}
    return row | {"mbs": work.mbs, "recompute_layers": work.recompute_layers, "offload_layers": work.offload_layers}


def _current(config: RunConfig, name: str) -> Any:
    section = config.parallel if hasattr(config.parallel, name) else config.workload
    value = getattr(section, name, None)
    return 1 if name == "vp" and value is None else value


def _serving_row(config: RunConfig) -> Row:
    """Return the most requests whose whole KV cache fits, in waves."""
    available = free_bytes(config)
    requests = MOST_REQUESTS
    if available is not None and memory_bytes(config.machine) is not None:
        requests = min(cache_capacity(config, available).requests, MOST_REQUESTS)
    if requests < 1:
        remedies = ["use more GPUs (--scale)"]
        if config.precision.dtype in ("fp32", "bf16") and not lacks_fp8(config.machine.gpu):
            remedies.append("or --dtype fp8")
        raise ConfigError(
            f"{config.model.name} in {config.precision.dtype} leaves no room for the KV cache of one request on "
            f"{config.machine.gpus} x {config.machine.gpu}; {', '.join(remedies)}"
        )
    requests = requests // 16 * 16 or requests
    return {"max_batch_size": requests, "concurrency": requests, "num_requests": WAVES * requests}
