"""Number formats that the native engine uses where a configuration leaves them open.

    with_number_formats(config)     the configuration with fp8_recipe, kv_dtype and fp8_experts filled in
    number_formats(config)          all that decide how numbers are rounded, for the result

They never depend on the number of GPUs. Training scales fp8 tensors as a whole, `tensorwise_delayed` from the amax of
earlier steps, `tensorwise_current` from the tensor itself at each use. With many scales, where `fp8_recipe_limits.py`
allows, `rowwise` scales each row of a GEMM's operand along the sum, `blockwise` 128 values of it, of weights blocks of
128 x 128. Served weights have a scale per tensor, per output channel or per block of 128 x 128, as the model is
published unless the run says otherwise.
"""

from dataclasses import replace
from typing import Any

from llmb.config.model import Model
from llmb.config.serialization import to_plain
from llmb.config.spec import Fp8Recipe, Inference, RunConfig, Training
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.shards import gradient_bytes

# Kind of run -> recipes of its engine; the default of training is the first.
FP8_RECIPES: dict[str, tuple[Fp8Recipe, ...]] = {
    "training": ("tensorwise_delayed", "tensorwise_current", "rowwise", "blockwise"),
    "outofcore": ("tensorwise_delayed", "rowwise", "blockwise"),
    "inference": ("tensorwise", "channelwise", "blockwise"),
}
BLOCK_SCALED = (
    "deepseek",
    "qwen3",
    "qwen3_moe",
    "minimax_m2",
)  # architectures published with one fp8 scale per 128 x 128 block of weights

FORMAT_FIELDS = (
    "dtype", "kv_dtype", "attention_dtype", "fp8_recipe", "fp8_experts", "fp8_fast_accum", "master_weights",
    "gradients", "reduce_dtype", "moments", "update", "frozen_weights",
)  # fmt: skip


def with_number_formats(config: RunConfig) -> RunConfig:
    """Return the configuration with the formats that the native engine will use; other engines have their own."""
    if config.engine != "native":
        return config
    work = config.workload
    precision = replace(config.precision, fp8_recipe=fp8_recipe(config))
    if isinstance(work, Inference) and precision.kv_dtype is None:
        precision = replace(precision, kv_dtype="fp32" if precision.dtype == "fp32" else "bf16")
    if isinstance(work, Training) and has_fp8_experts(config) and work.fp8_experts is None:
        work = replace(work, fp8_experts=True)
    return replace(config, precision=precision, workload=work)


def number_formats(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide how a run rounds its numbers; those without a meaning for it are left out."""
    values = to_plain(config.precision)
    if config.engine == "native":  # other engines choose theirs
        values |= to_plain(config.workload)
    if isinstance(config.workload, Training) and gradient_bytes(config) == 2:
        values["gradients"] = "bf16"  # also where nothing is accumulated: rounded once
    formats = {name: values[name] for name in FORMAT_FIELDS if values.get(name) is not None}
    return formats | ({"lora_rank": values["lora_rank"]} if values.get("lora_rank") else {})


def fp8_recipe(config: RunConfig) -> Fp8Recipe | None:
    """Return how the native engine scales fp8 tensors; None: the run has no fp8 GEMMs."""
    if config.precision.dtype != "fp8" or config.precision.fp8_recipe is not None:
        return config.precision.fp8_recipe
    if isinstance(config.workload, Inference):
        return published_fp8_recipe(config.model)
    return FP8_RECIPES[config.workload.kind][0]


def check_fp8_recipe(recipe: object, kind: str, dtype: str) -> None:
    """Refuse an fp8 recipe that runs of a kind do not have, or one without fp8 GEMMs; None leaves it open."""
    if recipe is None:
        return
    if recipe not in FP8_RECIPES[kind]:
        raise UnknownName(f"fp8_recipe of {kind}:", recipe, FP8_RECIPES[kind])
    if dtype != "fp8":
        raise ConfigError(f"fp8_recipe has no effect with dtype {dtype}; use dtype fp8 or leave it out")


def published_fp8_recipe(model: Model) -> Fp8Recipe:
    """Return the scales with which fp8 weights of a model are published."""
    return "blockwise" if model.architecture in BLOCK_SCALED else "channelwise"


def has_fp8_experts(config: RunConfig) -> bool:
    """Return whether the run has expert GEMMs that dtype fp8 is about."""
    return config.precision.dtype == "fp8" and config.model.experts is not None
