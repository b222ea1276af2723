"""Step descriptions from text: `--set tp=4`, GPU counts such as 8..16384, what-if changes such as network=0.5x."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmb.config.spec import Parallel
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.shapes.model_catalog import ModelShape
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.step_constants import ENGINES, parse_engine
from llmb.perfmodel.step_time.step_setup import DEFAULT_ENGINE, StepSetup, check_ranks, check_shards, parse_dtype

COUNTS = ("seqlen", "mbs", "gbs", "layers", "recompute_layers", "offload_layers")
LAYOUT = ("tp", "pp", "cp", "vp", "ep", "etp")
CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "dispatcher": ("alltoall", "deepep", "hybridep", "tokendrop"),
    "engine": tuple(ENGINES),
    "task": ("pretrain", "sft", "lora"),
    "cuda_graphs": ("true", "false"),
    "fsdp": ("true", "false"),
    "mtp": ("true", "false"),
    "overlap_experts": ("true", "false"),
    "fused_experts": ("true", "false"),
    "fp8_attention": ("true", "false"),
}
OF_EXPERTS = ("dispatcher", "overlap_experts", "fused_experts")  # fields that only a mixture of experts has
FIELDS = (*LAYOUT, *COUNTS, *CHOICES)
CHANGES = ("gpu.hbm_bw", "gpu.flops", "gpu.nvlink", "gpu.link_domain", "network")
DEFAULT_SEQLEN, MOST_GPUS = 4096, 1 << 22


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Return `FIELD=VALUE` settings of a training run by field, checked."""
    return parse_fields(settings, FIELDS, _parse_value)


def parse_fields(settings: list[str], fields: Sequence[str], parse: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return `FIELD=VALUE` settings by field; `parse` checks the value of a field."""
    values: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected FIELD=VALUE; fields are: {', '.join(fields)}")
        if name not in fields:
            raise UnknownName("field of --set", name, fields)
        values[name] = parse(name, value.strip().lower())
    return values


def _parse_value(name: str, text: str) -> Any:
    if name in CHOICES:
        text = parse_engine(text) if name == "engine" else text
        if text not in CHOICES[name]:
            raise UnknownName(f"value of {name}", text, CHOICES[name])
        return text == "true" if CHOICES[name] == ("true", "false") else text
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ConfigError(f"{name} must be a whole number, 1 or more, got {text!r}")
    return int(text)


def build_setup(shape: ModelShape, gpu: str, gpus: int, dtype: str, values: dict[str, Any]) -> StepSetup:
    """Return the description of any model and layout; the batch is one micro-batch per replica unless given."""
    engine = values.get("engine", DEFAULT_ENGINE)
    if not values.get("mtp", trains_mtp(engine)):
        shape = replace(shape, mtp_depth=0)
    layout: dict[str, Any] = {"etp": default_etp(engine, values.get("tp", 1)) if shape.model.experts else 1}
    layout |= {name: values[name] for name in LAYOUT if name in values}
    parallel = Parallel(fsdp=values.get("fsdp", is_sharded_by_default(engine)), **layout)
    ranks, mbs = parallel.tp * parallel.pp * parallel.cp, values.get("mbs", 1)
    check_shards(shape.model, parallel)
    check_ranks(gpus, parallel)
    _check_effect(shape, values)
    setup = StepSetup(
        shape=shape,
        gpu=gpu,
        gpus=gpus,
        dtype=parse_dtype(dtype),
        seqlen=values.get("seqlen", DEFAULT_SEQLEN),
        mbs=mbs,
        gbs=values.get("gbs", mbs * gpus // ranks),
        parallel=parallel,
        layers=values.get("layers"),
        recompute=values.get("recompute", "full" if "recompute_layers" in values else "none"),
        recompute_layers=values.get("recompute_layers"),
        offload_layers=values.get("offload_layers", 0),
        graphs=float(values.get("cuda_graphs", False)),
        engine=engine,
        dispatcher=values.get("dispatcher", "alltoall"),
        overlap_experts=values.get("overlap_experts", False),
        fused_experts=values.get("fused_experts", False),
        fp8_attention=values.get("fp8_attention", False),
        task=values.get("task", "pretrain"),
    )
    _check_layers(setup)
    return setup


def trains_mtp(engine: str) -> bool:
    """Return whether an engine trains the multi-token prediction of a model that has one, by default."""
    return engine.startswith("megatron")


def default_etp(engine: str, tp: int) -> int:
    """Return the ranks that share an expert where nobody says: Megatron of 2024 split experts over tp too."""
    return tp if engine == "megatron-2024" else 1


def is_sharded_by_default(engine: str) -> bool:
    """Return whether an engine shards weights over all replicas by default."""
    return engine == "torchtitan"


def _check_effect(shape: ModelShape, values: dict[str, Any]) -> None:
    """Refuse settings that would change nothing."""
    unused = [name for name in OF_EXPERTS if values.get(name)]
    if unused and shape.model.experts is None:
        raise ConfigError(f"{unused[0]} has no effect: {shape.model.name} has no experts; leave it out")
    if values.get("vp", 1) > 1 and values.get("pp", 1) == 1:
        raise ConfigError(f"vp {values['vp']} has no effect without pipeline stages; leave it out, or set pp")
    if values.get("etp", 1) > 1 and shape.model.experts is None:
        raise ConfigError(f"etp {values['etp']} has no effect: {shape.model.name} has no experts; leave it out")
    if "recompute_layers" in values and values.get("recompute", "full") != "full":
        raise ConfigError(f"recompute_layers has no effect with recompute={values['recompute']}; leave one of them out")


def _check_layers(setup: StepSetup) -> None:
    """Refuse to recompute or offload more layers than the fullest pipeline rank has."""
    free = setup.most_layers - setup.recomputed_layers
    for name, layers, most in (
        ("recompute_layers", setup.recompute_layers or 0, setup.most_layers),
        ("offload_layers", setup.offload_layers, free),
    ):
        if layers > most:
            raise ConfigError(f"{name} {layers}: at most {most} of the {setup.most_layers} layers of a pipeline rank")


def parse_scales(text: str) -> list[int]:
    """Return the GPU counts of `512`, `8,64` or `8..16384` (8 and its doublings)."""
    ends = re.fullmatch(r"(\d{1,8})\.\.(\d{1,8})", text)
    if ends and 0 < int(ends[1]) <= int(ends[2]) <= MOST_GPUS:
        first, last = int(ends[1]), int(ends[2])
        return [first << power for power in range((last // first).bit_length())]
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,8}", part) and 0 < int(part) <= MOST_GPUS for part in parts):
        raise ConfigError(f"--scale: expected GPU counts such as 512, 8,64 or 8..16384, got {text[:60]!r}")
    return [int(part) for part in parts]


def layout_gpus(tp: int, pp: int, cp: int, ep: int, etp: int) -> int:
    """Return the GPUs of which a layout takes a multiple: in each stage whole groups of tp x cp and of ep x etp."""
    return pp * math.lcm(tp * cp, ep * etp)


def scaled(setup: StepSetup, gpus: int) -> StepSetup:
    """Return the same layout on another number of GPUs, with as many sequences per GPU (weak scaling)."""
    if setup.gbs * gpus % setup.gpus:
        raise ConfigError(f"gbs {setup.gbs} on {setup.gpus} GPUs does not scale to {gpus}")
    return replace(setup, gpus=gpus, gbs=setup.gbs * gpus // setup.gpus)


def changed_device(on: Device, text: str) -> Device:
    """Return a GPU with changes such as `gpu.hbm_bw=2x,network=0.5x`."""
    for change in text.split(","):
        name, _, value = change.strip().partition("=")
        if name not in CHANGES:
            raise UnknownName("field of --what-if", name, CHANGES)
        on = _changed(on, name, value)
    return on


def _changed(on: Device, name: str, value: str) -> Device:
    if name == "gpu.link_domain":
        if not re.fullmatch(r"[1-9]\d{0,5}", value):
            raise ConfigError(f"--what-if {name}: expected a number of GPUs such as 72, got {value!r}")
        return replace(on, fabric=replace(on.fabric, link_domain=int(value)))
    if not re.fullmatch(r"\d+(\.\d+)?x", value) or not float(value[:-1]):
        raise ConfigError(f"--what-if {name}: expected a factor such as 2x or 0.5x, got {value!r}")
    factor = float(value[:-1])
    if name == "network":
        return replace(on, fabric=replace(on.fabric, network=on.network * factor))
    if name == "gpu.flops":
        peaks = {dtype: peak * factor for dtype, peak in on.gpu.peak_flops.items()}
        return replace(on, gpu=replace(on.gpu, peak_flops=peaks))
    if name == "gpu.nvlink":
        return replace(on, gpu=replace(on.gpu, link_bandwidth=on.link_bandwidth * factor))
    return replace(on, gpu=replace(on.gpu, memory_bandwidth=on.memory_bandwidth * factor))
