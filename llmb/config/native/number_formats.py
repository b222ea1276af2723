"""Number formats that the native engine uses where a configuration leaves them open.

    with_number_formats(config)     the configuration with fp8_scaling, kv_dtype and fp8_experts filled in
    number_formats(config)          all that decide how numbers are rounded, for the result

Training scales fp8 tensors as a whole: `delayed` takes the scale from the amax of earlier steps (fused Llama layers on
one GPU, out-of-core training), `current` from the tensor itself at each use. Served weights have a scale per tensor,
per output channel or per block of 128 x 128, as the model is published unless the run says otherwise.
"""

from dataclasses import replace
from typing import Any, Literal

from llmb.config.serialization import to_plain
from llmb.config.spec import Inference, Model, OutOfCore, RunConfig, Training
from llmb.perfmodel.shards import gradient_bytes, has_split_weights, is_fused

BLOCK_SCALED = ("deepseek",)  # architectures published with one fp8 scale per 128 x 128 block of weights

FORMAT_FIELDS = (
    "dtype", "kv_dtype", "fp8_scaling", "fp8_experts", "fp8_fast_accum", "master_weights", "gradients", "moments",
    "update",
)  # fmt: skip

Fp8Scaling = Literal["tensor", "channel", "block", "delayed", "current"]


def with_number_formats(config: RunConfig) -> RunConfig:
    """Return the configuration with the formats that the native engine will use; other engines have their own."""
    if config.engine != "native":
        return config
    work = config.workload
    precision = replace(config.precision, fp8_scaling=fp8_scaling(config))
    if isinstance(work, Inference) and precision.kv_dtype is None:
        precision = replace(precision, kv_dtype="fp32" if precision.dtype == "fp32" else "bf16")
    if isinstance(work, Training) and has_fp8_experts(config) and work.fp8_experts is None:
        work = replace(work, fp8_experts=True)
    return replace(config, precision=precision, workload=work)


def number_formats(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide how a run rounds its numbers; those without a meaning for it are left out."""
    values = to_plain(config.precision) | to_plain(config.workload)
    if isinstance(config.workload, Training) and has_split_weights(config) and gradient_bytes(config) == 2:
        values["gradients"] = "bf16"  # also where nothing is accumulated: rounded once
    return {name: values[name] for name in FORMAT_FIELDS if values.get(name) is not None}


def fp8_scaling(config: RunConfig) -> Fp8Scaling | None:
    """Return how the native engine scales fp8 tensors; None: the run has no fp8 GEMMs."""
    if config.precision.dtype != "fp8":
        return None
    if isinstance(config.workload, Inference):
        return config.precision.fp8_scaling or published_fp8_scaling(config.model)
    return "delayed" if isinstance(config.workload, OutOfCore) or is_fused(config) else "current"


def published_fp8_scaling(model: Model) -> Fp8Scaling:
    """Return the scales with which fp8 weights of a model are published."""
    return "block" if model.architecture in BLOCK_SCALED else "channel"


def has_fp8_experts(config: RunConfig) -> bool:
    """Return whether the run has expert GEMMs that dtype fp8 is about."""
    return config.precision.dtype == "fp8" and config.model.experts is not None
