"""Settings of a run as `llmb-run show` prints them: the value that will be used, in words where it is null.

settings(config) -> ("dtype", "fp8"), ("fp8_recipe", "tensorwise_delayed: one scale per tensor, ..."), ...
precision_text(formats) -> "fp8 tensorwise delayed, fp32-equivalent master weights, gradients fp32, moments fp32"
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmb.config.lr_schedule import lr_sources
from llmb.config.native.number_formats import number_formats
from llmb.config.overrides import typed_value
from llmb.config.serialization import to_plain
from llmb.config.settable_fields import WITHOUT_EFFECT
from llmb.config.spec import OutOfCore, Override, RunConfig, Training
from llmb.perfmodel import hardware
from llmb.perfmodel.shards import gradient_bytes

COMPUTED = {"plan", "prediction"}  # shown as tables of their own
FP8_SCALES = {
    "tensorwise_delayed": "one scale per tensor, by the amax of earlier steps",
    "tensorwise_current": "one scale per tensor, by its own amax",
    "rowwise": "one scale per row of each operand along the sum, by its own amax",
    "tensorwise": "one scale per weight",
    "channelwise": "one scale per output channel and per token",
    "blockwise": "one scale per 128 x 128 weights and per 128 values of a token",
}
UPDATES = {
    "master": "fp32-equivalent master weights",
    "stochastic": "bf16 weights with stochastic rounding",
    "nearest": "bf16 weights rounded to nearest",
}
NULLS = {
    "fp8_recipe": "none: no fp8 GEMMs",
    "fp8_experts": "none: no experts in fp8",
    "vp": "none: not interleaved",
    "lr_decay_steps": "none: constant",
    "checkpoint_every": "none: no checkpoints",
    "resume": "none: from step 1",
    "profiler": "Nsight Systems where installed, else torch.profiler",
    "stall_limit_s": "by the step times",
    "dataset": "none: random tokens of these lengths",
    "weights": "none: random",
    "warmup_requests": "a full batch",
    "draft": "none: no speculative decoding",
    "draft_acceptance": "none: drafts that equal the model's own tokens",
    "clip": "none: no clipping",
    "export": "none: not written",
    "data": "none: synthetic tokens",
    "lora_alpha": "none: without LoRA",
    "frozen_weights": "none: no frozen weights, or in the dtype of the run",
}
EMPTY = {"profile_ranks": "all", "lora_targets": "none: without LoRA", "slurm_params": "none"}
BY_ENGINE = "as the engine chooses"
BY_PLAN = "by the plan below"


def settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield every setting with an effect on this kind of run, and its value."""
    gpu = hardware.gpu(config.machine.gpu)
    yield "engine", config.engine
    yield "machine", f"{config.machine.gpus} x {gpu.title} on {config.machine.nodes} node(s)"
    yield "model", f"{config.model.name} ({config.model.architecture}, {config.model.layers} layers)"
    if config.engine == "native":
        yield "precision", precision_text(number_formats(config))
    sources = lr_sources(config)
    hidden = WITHOUT_EFFECT[config.workload.kind] | COMPUTED | {"kind"}
    hidden |= {"fp8_experts"} if config.model.experts is None else set()
    for section in ("precision", "parallel", "workload", "profile", "limits"):
        for name, value in to_plain(getattr(config, section)).items():
            if name not in hidden:
                text = _text(config, name, value)
                yield name, f"{text} ({sources[name]})" if name in sources else text


def precision_text(formats: Mapping[str, Any]) -> str:
    """Return the number formats of a run, those of its config or of a stored result, in words."""
    parts = [" ".join([str(formats.get("dtype")), *str(formats.get("fp8_recipe") or "").split("_")]).rstrip()]
    if formats.get("fp8_experts") is False:
        parts.append("experts bf16")
    if formats.get("fp8_fast_accum"):
        parts.append("fast accumulation in backward")
    if "master_weights" in formats:
        exact = "fp32" if formats.get("dtype") == "fp32" else "fp32-equivalent"
        is_exact = formats["master_weights"] == "fp32"
        parts.append(f"{exact} master weights" if is_exact else "bf16 master weights with stochastic rounding")
    if "lora_rank" in formats:
        parts.append(lora_text(formats["lora_rank"], formats.get("frozen_weights")))
    if "update" in formats:
        is_fp32 = formats.get("dtype") == "fp32"  # nothing is rounded then
        parts.append("fp32 weights" if is_fp32 else UPDATES.get(formats["update"], formats["update"]))
    parts += [f"{name} {formats[name]}" for name in ("gradients", "moments") if name in formats]
    if formats.get("reduce_dtype", "fp32") != "fp32":
        parts.append(f"gradients reduced in {formats['reduce_dtype']}")
    if "kv_dtype" in formats:
        parts.append(f"KV cache {formats['kv_dtype']}")
    if "attention_dtype" in formats:
        parts.append(f"prefill attention {formats['attention_dtype']}")
    return ", ".join(parts)


def lora_text(rank: int, frozen_weights: str | None) -> str:
    """Return what is trained, and the dtype of what is not; None: that of the run."""
    return f"LoRA of rank {rank} on frozen {f'{frozen_weights} ' if frozen_weights else ''}weights"


def override_rows(overrides: Iterable[Override]) -> list[tuple[str, str, str, str]]:
    """Return field, replaced value, value and source of changed settings, values as they are typed."""
    return [
        (
            o.field,
            "" if o.replaced is None else typed_value(o.replaced, o.field),
            typed_value(o.value, o.field),
            o.source,
        )
        for o in overrides
    ]


def override_text(override: Override) -> str:
    """Return a changed setting as it is typed: `window = 3-5 instead of 11-44`, `profile = true`."""
    field = override.field
    default = "" if override.replaced is None else f" instead of {typed_value(override.replaced, field)}"
    return f"{field} = {typed_value(override.value, field)}{default}"


def _text(config: RunConfig, name: str, value: Any) -> Any:
    if name == "gradients" and isinstance(config.workload, Training):
        return _gradients(config, value)
    if name == "master_weights" and value == "fp32" and config.engine == "native" and config.precision.dtype != "fp32":
        return "fp32: a bf16 half, which GEMMs read, and 16 low bits"
    if name == "update" and config.precision.dtype == "fp32":
        return f"{value}: nothing is rounded in fp32"
    if name == "fp8_recipe" and value is not None:
        experts = isinstance(config.workload, Training) and config.workload.fp8_experts
        return f"{value}: {FP8_SCALES[value]}" + ("; of experts per row and column" if experts else "")
    if isinstance(value, tuple):
        separator = " " if name in ("draft_acceptance", "lora_targets") else "-"
        return separator.join(map(str, value)) if value else EMPTY.get(name, "none")
    if value is None:
        return _null(config, name)
    return value


def _null(config: RunConfig, name: str) -> str:
    if config.engine != "native" and name in ("fp8_recipe", "fp8_experts", "kv_dtype"):
        return BY_ENGINE
    if isinstance(config.workload, OutOfCore) and name not in NULLS:
        return BY_PLAN
    return NULLS.get(name, "none")


def _gradients(config: RunConfig, value: str) -> str:
    """Describe the format of gradients: with one contribution a step they are rounded to bf16 once, not accumulated."""
    if value == "fp32" and gradient_bytes(config) == 2:
        return "bf16: one micro-batch a step; the loss accumulates in fp32"
    return value
