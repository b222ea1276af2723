"""Model of a run: the recipe's, with fields changed by `--set model.FIELD=VALUE`, or a proxy of it."""

from dataclasses import replace

from llmb.config.model import Model
from llmb.config.native.predicted_blocks import check_native_blocks
from llmb.config.overrides import parse_value
from llmb.config.parallel_layout import check_model, check_serving, max_layers_per_rank
from llmb.config.proxy import describe_change, small_proxy, true_width_proxy
from llmb.config.recipe import Recipe, Row
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import RENAMED_FIELDS, convert, field_types, to_plain
from llmb.config.serving_settings import describe_lengths
from llmb.config.spec import Override, Parallel, RunConfig, Training, Workload
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.params import FP8_ALIGNMENT, FP8_BLOCK

MEMORY_FRACTION = 0.9  # usable: the estimate leaves out the CUDA context, workspaces and fragmentation
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")


def base_model(
    recipe: Recipe, request: RunRequest, row: Row, parallel: Parallel, values: Row
) -> tuple[Model, list[str]]:
    """Return the model or its small proxy, with notes on the difference; a proxy row may define its own model."""
    real = recipe.model(request.size)
    if not request.uses_proxy or request.proxy == "true-width":
        return real, []
    if "model" in row and (row["model"] or request.proxy is None):
        proxy = recipe.model(request.size, row["model"])
        if proxy == real:
            return real, []
    else:
        check_layout(parallel, changed_model(real, request)[0], values)  # the proxy itself is enlarged for any layout
        blocks = values.get("fp8_recipe") == "blockwise" and recipe.kind != "inference"
        proxy = small_proxy(real, parallel, FP8_BLOCK if blocks else FP8_ALIGNMENT)
    lengths = describe_lengths(recipe, values) if "isl" in values else f"sequences of {values['seqlen']} tokens"
    return proxy, [f"{describe_change(real, proxy)}, {lengths}"]


def changed_model(model: Model, request: RunRequest) -> tuple[Model, list[Override]]:
    """Apply `--set model.layers=2`; a changed model is always a proxy."""
    records = []
    for setting in request.settings:
        if setting.field.startswith("model."):
            name = setting.field.removeprefix("model.")
            if name not in field_types(Model):
                renamed = RENAMED_FIELDS["Model"].get(name)
                raise UnknownName(f"model field ({setting.source}):", name, field_types(Model), renamed)
            value = convert(field_types(Model)[name], parse_value(field_types(Model)[name], setting.value, name), name)
            if name in SIZES and value < 1:
                raise ConfigError(f"{setting.field} ({setting.source}): {value} is out of range; it must be at least 1")
            replaced = getattr(model, name)
            records.append(Override(field=setting.field, value=value, replaced=replaced, source=setting.source))
            model = replace(model, **{name: value})
    return model, records


def check_heads(model: Model) -> None:
    """Refuse attention heads that no engine can build."""
    check_native_blocks(model)
    if model.mla is None and model.blocks.get("attention"):
        if model.heads % model.kv_heads:
            raise ConfigError(f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}")
        if model.rope is not None and model.head_dim % 2:
            raise ConfigError(f"model.head_dim={model.head_dim} is odd; RoPE rotates pairs, so it must be even")


def check_layout(parallel: Parallel, model: Model, values: Row) -> None:
    """Check that the layout divides the model, in training or in serving."""
    if "max_batch_size" in values:
        check_serving(parallel, model, values.get("attention_dp", False))
    else:
        check_model(parallel, model)


def at_true_width(config: RunConfig, memory_gib: float | None) -> RunConfig:
    """Return the run with as many of the model's real layers as fit into memory."""
    budget = memory_gib * hardware.GIB if memory_gib else hardware.memory_bytes(config.launch_machine)
    if budget is None:
        raise ConfigError("a true-width proxy needs a memory budget; add --device-gb GIB")

    values = to_plain(config.workload)

    def fits(model: Model) -> bool:
        try:
            check_layout(config.parallel, model, values)
        except ConfigError:
            return False
        return memory_estimate(replace(config, model=model)).total <= MEMORY_FRACTION * budget

    model = true_width_proxy(config.model, fits)
    note = f"true width, {describe_change(config.model, model)}"
    proxy = f"{config.proxy}; {note}" if config.proxy else note
    return replace(config, model=model, proxy=proxy, reference=None, workload=_within_layers(config, model))


def _within_layers(config: RunConfig, model: Model) -> Workload:
    """Return the workload with no more recomputed and offloaded layers than a rank of this model has."""
    work = config.workload
    if not isinstance(work, Training):
        return work
    layers = max_layers_per_rank(model.layers, config.parallel)
    recomputed = min(work.recompute_layers, layers)
    return replace(work, recompute_layers=recomputed, offload_layers=min(work.offload_layers, layers - recomputed))
