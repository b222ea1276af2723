"""Limits of a chip that no figure can exceed: compute, memory bandwidth, and the limits of training.

    training_limits(setup, step_time_s=4.19)      -> [Limit(name="compute", ...)]

A figure above a limit is not possible as described, so a limit must hold for every chip of a type. Memory does not
exceed its nominal bandwidth. Compute of the chip that was measured, Hopper with at most the 700 W of an H200, does not
exceed the most that whole steps reached on an H200, 717 of 989 TFLOP/s in bf16 and 1,401 of 1,979 in fp8
(bench/RESULTS.md), by more than `SPREAD`: its power does not sustain higher clocks. What other chips sustain is not
known here, so that only their peak at the highest clock they run at is a limit. Clocks are higher for the first second
of work: `BURST` is what short kernels reach.
"""

from dataclasses import dataclass

from llmb.config.model import Model
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.flops import attention_pairs, forward_macs
from llmb.perfmodel.hardware import TERA, gpu
from llmb.perfmodel.step_time.cluster_fabric import FABRICS

MEASURED = "h200"
SUSTAINED = {"fp32": 0.725, "bf16": 0.725, "fp8": 0.71, "nvfp4": 0.71}  # of the dense peak
SPREAD = 1.05  # between chips of one type: 2 to 3 % were seen
BURST = {"fp32": 0.94, "bf16": 0.94, "fp8": 0.80, "nvfp4": 0.80}  # 925 and 1,582 TFLOP/s in kernel tables of an H200
# Highest SM clock over that of the data sheet's peaks, in MHz: H100 1,980 over 1,830, B200 1,965 over 1,856, A100 1,410
# over 1,410.
HIGHEST_CLOCK = 1.09
BY_MEASUREMENT = "the most measured in whole steps on an H200 of 700 W, and 5 % more for other chips"
BY_PEAK = "dense peak at the highest clock; what the chip sustains was not measured"
BY_SHORT_PEAK = "dense peak at the highest clock, as a prompt is too short for clocks to fall"
BY_NOMINAL = "nominal bandwidth"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Rate that a figure needs of a chip, beside the most that the chip gives."""

    name: str
    needed: float  # of one GPU
    limit: float
    unit: str
    basis: str  # where the limit comes from

    @property
    def fraction(self) -> float:
        """Above 1: not possible."""
        return self.needed / self.limit


@dataclass(frozen=True, kw_only=True)
class StepAmount:
    """Training work of a step that a time is claimed for."""

    model: Model
    seqlen: int
    sequences: float  # of a step
    gpus: int
    gpu: str
    dtype: str  # a key of SUSTAINED
    frozen: bool = False  # LoRA: no weight gradients
    spared_macs: float = 0.0  # of a sequence, by windows that the model's description does not have


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The most that any chip of a type gives: FLOP/s or bytes/s."""

    rate: float
    basis: str


def flops_ceiling(gpu_type: str, dtype: str, is_short: bool = False) -> Ceiling | None:
    """Return the FLOP/s that no run of GEMMs of a dtype exceeds, in bf16 where the GPU has no such units.

    `is_short`: work of milliseconds, during which clocks need not fall. None: no peak is published, or clocks far above
    those of the data sheet are usual (GeForce).
    """
    peaks = gpu(gpu_type).peak_flops
    if gpu_type not in FABRICS:
        return None
    kind, fabric, measured = dtype if dtype in peaks else "bf16", FABRICS[gpu_type], FABRICS[MEASURED]
    sustained = gpu(MEASURED).peak_flops[kind] * SUSTAINED[kind] * SPREAD if kind in gpu(MEASURED).peak_flops else 0.0
    highest = peaks[kind] * HIGHEST_CLOCK
    if is_short:
        return Ceiling(rate=highest, basis=BY_SHORT_PEAK)
    if fabric.family == measured.family and fabric.watts <= measured.watts and sustained < highest:
        return Ceiling(rate=sustained, basis=BY_MEASUREMENT)
    return Ceiling(rate=highest, basis=BY_PEAK)


def bandwidth_ceiling(gpu_type: str) -> Ceiling | None:
    """Return the bytes/s that HBM cannot exceed."""
    bandwidth = gpu(gpu_type).memory_bandwidth
    return None if bandwidth is None else Ceiling(rate=bandwidth, basis=BY_NOMINAL)


def compute_limit(
    low: float, bf16: float, per_s: float, gpu_type: str, dtype: str, is_short: bool = False
) -> Limit | None:
    """Return the limit of work with `low` FLOPs in the dtype and `bf16` FLOPs beside them, done `per_s` times a second.

    Its limit is the rate of both kinds one after the other. None: the peaks of the GPU are not known.
    """
    low_ceiling, bf16_ceiling = flops_ceiling(gpu_type, dtype, is_short), flops_ceiling(gpu_type, "bf16", is_short)
    if low_ceiling is None or bf16_ceiling is None:
        return None
    limit = (low + bf16) / (low / low_ceiling.rate + bf16 / bf16_ceiling.rate)
    return Limit(
        name="compute", needed=(low + bf16) * per_s / TERA, limit=limit / TERA, unit="TFLOP/s/GPU",
        basis=low_ceiling.basis,
    )  # fmt: skip


def training_limits(amount: StepAmount, step_time_s: float) -> list[Limit]:
    """Return the limits of a training step: model FLOPs with causal attention, without recompute."""
    low, bf16 = _training_flops(amount)
    limit = compute_limit(low, bf16, 1 / step_time_s, amount.gpu, amount.dtype)
    return [] if limit is None else [limit]


def _training_flops(amount: StepAmount) -> tuple[float, float]:
    """Return the FLOPs of one GPU in a step: of GEMMs of layers, and of attention and the LM head, in bf16."""
    macs = forward_macs(amount.model, amount.seqlen, "causal")
    pairs = attention_pairs(amount.seqlen, "causal")
    scores = sum(count * pairs * block.pair_macs for _, count, block in block_stack(amount.model))
    per_mac = (4.0 if amount.frozen else 6.0) * amount.sequences / amount.gpus
    low = sum(macs.values()) - macs["lm_head"] - scores
    return per_mac * low, per_mac * (macs["lm_head"] + scores - amount.spared_macs)
