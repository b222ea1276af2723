"""Prediction of a training step: time, waterfall, throughput, MFU, memory and an 80 % interval.

predict(setup).step_time_s
predict(setup).interval_80            -> (shortest, longest) step time in seconds
"""

import math
from dataclasses import dataclass, replace

from llmb.perfmodel.block_costs import BLOCK_COSTS
from llmb.perfmodel.flops import flops_breakdown
from llmb.perfmodel.hardware import GB, GIB
from llmb.perfmodel.memory_estimate import MemoryEstimate, memory_estimate
from llmb.perfmodel.shapes.model_catalog import ModelShape
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, Device, device
from llmb.perfmodel.step_time.fitted_constants import NATIVE_FILE, Constants, native_constants, read_interval
from llmb.perfmodel.step_time.run_description import NATIVE, run_config
from llmb.perfmodel.step_time.saved_activations import saved_fraction, whole_logits
from llmb.perfmodel.step_time.step_constants import NEWEST, calibrated, interval_data
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.waterfall import StepWork, step_terms, step_work


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Predicted step time with its waterfall."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float  # model FLOPs, causal attention, without recompute
    mfu: float | None  # against the dense peak of the run's dtype; null: only measured rates of the GPU are known
    memory_gib: float  # estimate for the fullest GPU
    interval_80: tuple[float, float]  # of the step time, in seconds
    terms: dict[str, float]  # seconds


def predict(
    setup: StepSetup, on: Device | None = None, c: Constants | None = None, memory_gib: float | None = None
) -> StepPrediction:
    """Predict one training step, on a GPU of the table or one with what-if changes; estimates memory if not given."""
    step = step_work(setup, on)
    terms = step_terms(step, c or constants_of(setup))
    seconds = sum(terms.values())
    rate = model_flops(setup) / seconds / setup.gpus
    half_width = log_half_width(setup)
    return StepPrediction(
        step_time_s=seconds,
        tokens_per_s_per_gpu=setup.gbs * setup.seqlen / seconds / setup.gpus,
        tflops_per_gpu=rate / 1e12,
        mfu=rate / peak_flops(step) if step.device.key in FABRICS else None,
        memory_gib=step_memory(setup).total / GIB if memory_gib is None else memory_gib,
        interval_80=(seconds * math.exp(-half_width), seconds * math.exp(half_width)),
        terms=terms,
    )


def constants_of(setup: StepSetup) -> Constants:
    """Return the calibrated constants of the run's engine; with the link between GPUs that `probe` measured here."""
    if setup.engine != NATIVE:
        return calibrated()
    constants = calibrated() | native_constants("replaced")
    measured = setup.rates.bus_gbs if setup.rates is not None and setup.gpu in FABRICS else None
    return constants if measured is None else constants | {"link": measured * GB / device(setup.gpu).link_bandwidth}


def model_flops(setup: StepSetup) -> float:
    """Return the model FLOPs of a step: causal attention, backward twice the forward, or once with frozen weights."""
    shape = setup.shape
    parts = flops_breakdown(shape.model, setup.seqlen, "causal")
    if "attention" in parts:
        parts["attention"] -= 6.0 * spared_macs(shape, setup.seqlen)
    layers = (sum(parts.values()) - parts["lm_head"]) * setup.layer_count / shape.model.layers
    blocks = sum(parts[kind] / shape.model.blocks[kind] for kind in shape.mtp_blocks)
    mtp = shape.mtp_depth * (blocks + parts["lm_head"] + 6.0 * setup.seqlen * 2 * shape.model.hidden**2)
    return (layers + parts["lm_head"] + mtp) * setup.gbs * (2 / 3 if setup.task == "lora" else 1.0)


def spared_macs(shape: ModelShape, seqlen: int) -> float:
    """Return the MACs of a sequence that windows of the catalog's models spare, which `flops.py` does not know of."""
    if shape.window is None or shape.model.window is not None:
        return 0.0
    pairs = seqlen * max(0.0, seqlen / 2 - shape.window)
    return shape.window_layers * pairs * BLOCK_COSTS["attention"](shape.model).pair_macs


def peak_flops(step: StepWork) -> float:
    """Return the dense peak of the run's dtype, or of bf16 where the GPU has no such units."""
    peaks = step.device.gpu.peak_flops
    return peaks.get(step.setup.peak_dtype) or peaks["bf16"]


def interval_class(setup: StepSetup) -> str:
    """Return the kind of run whose left-out residuals give the width of the interval."""
    if not setup.engine.startswith("megatron"):
        return "other_engine"
    model = setup.shape.model
    return "experts_or_mamba" if model.experts or model.mamba or model.delta_net else "dense"


def scarcity(setup: StepSetup) -> float:
    """Return how many times as wide the interval is for kinds of run that few models were published of.

    Fine-tuning, an engine's releases of the last months, low precision in engines other than Megatron; and ours, which
    nobody measured on several GPUs.
    """
    is_plain = setup.engine.startswith("megatron") or setup.dtype == "bf16"
    is_scarce = setup.task != "pretrain" or setup.engine in (NEWEST, NATIVE) or not is_plain
    return float(interval_data()["scarce"]) if is_scarce else 1.0


def log_half_width(setup: StepSetup) -> float:
    """Return half the width of the 80 % interval, in log space.

    Wider for a GPU without published rows, and for kinds of run that few models were published of.
    """
    data = interval_data()
    native = read_interval(NATIVE_FILE)
    if setup.engine == NATIVE and setup.gpus == 1 and setup.gpu in native["measured_gpus"]:
        return float(native["one_gpu"])
    unseen = 1.0 if setup.gpu in data["gpus"] else float(data["unseen_gpu"])
    return float(data["half_width"][interval_class(setup)]) * unseen * scarcity(setup)


def step_memory(setup: StepSetup) -> MemoryEstimate:
    """Return the memory estimate of the fullest GPU; frozen weights have neither gradients nor optimizer state.

    Its experts get more tokens than on average, as many as the native engine has room for at first.
    """
    if setup.fsdp_ranks is not None:  # as much as a run of one group that has all weights
        split = setup.parallel
        experts = split.ep * split.etp  # whose ranks may be more than those of one group
        dp = math.lcm(setup.fsdp_ranks // split.cp, experts // math.gcd(experts, split.tp * split.cp))
        gpus, gbs = setup.gpus // setup.dp * dp, setup.gbs // setup.dp * dp
        setup = replace(setup, gpus=gpus, gbs=gbs, fsdp_ranks=None)
    estimate = memory_estimate(run_config(setup))
    if setup.engine == NATIVE:  # exact
        return estimate
    activations = estimate.activations * saved_fraction(setup) + whole_logits(setup)
    estimate = replace(estimate, activations=activations)
    return replace(estimate, gradients=0.0, optimizer=0.0) if setup.task == "lora" else estimate
