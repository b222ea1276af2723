"""Limits of a chip: what a long run sustains of its peak and of its memory bandwidth, and the limits of training.

    training_limits(setup, step_time_s=4.19)      -> [Limit(name="compute", ...)]

A figure above a limit is not possible as described. Fractions of the peaks are the most that whole steps were measured
at on an H200 of 700 W: 717 of 989 TFLOP/s in bf16, 1,401 of 1,979 in fp8, reading at 4.52 of 4.8 TB/s
(bench/RESULTS.md). Clocks are higher for the first second of work: `BURST` is what short kernels reach.
"""

from dataclasses import dataclass

from llmb.config.spec import Model
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.flops import attention_pairs, forward_macs
from llmb.perfmodel.hardware import TERA, gpu
from llmb.perfmodel.step_time.cluster_fabric import FABRICS

SUSTAINED = {"fp32": 0.725, "bf16": 0.725, "fp8": 0.71, "nvfp4": 0.71}  # of the dense peak
BURST = {"fp32": 0.94, "bf16": 0.94, "fp8": 0.80, "nvfp4": 0.80}  # 925 and 1,582 TFLOP/s in kernel tables of an H200
BANDWIDTH = 0.945  # of the nominal HBM bandwidth


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Rate that a figure needs of a chip, beside the most that the chip gives."""

    name: str
    needed: float  # of one GPU
    limit: float
    unit: str

    @property
    def fraction(self) -> float:
        """Above 1: not possible."""
        return self.needed / self.limit


@dataclass(frozen=True, kw_only=True)
class StepAmount:
    """Training work of a step that a time is claimed for."""

    model: Model
    seqlen: int
    sequences: int  # of a step
    gpus: int
    gpu: str
    dtype: str  # a key of SUSTAINED
    frozen: bool = False  # LoRA: no weight gradients


def sustained_flops(gpu_type: str, dtype: str) -> float | None:
    """Return the FLOP/s that GEMMs of a dtype sustain, at the rate of bf16 where the GPU has no such units.

    None: no peak is published, or the fraction of it that chips of this family sustain is not known.
    """
    peaks, fabric = gpu(gpu_type).peak_flops, FABRICS.get(gpu_type)
    kind = dtype if dtype in peaks else "bf16"
    return peaks[kind] * min(1.0, SUSTAINED[kind] * max(1.0, fabric.clock)) if fabric is not None else None


def sustained_bandwidth(gpu_type: str) -> float | None:
    """Return the bytes/s that HBM sustains."""
    bandwidth = gpu(gpu_type).memory_bandwidth
    return None if bandwidth is None else bandwidth * BANDWIDTH


def compute_limit(low: float, bf16: float, per_s: float, gpu_type: str, dtype: str) -> Limit | None:
    """Return the limit of work with `low` FLOPs in the dtype and `bf16` FLOPs beside them, done `per_s` times a second.

    Its limit is the rate of both kinds one after the other. None: the peaks of the GPU are not known.
    """
    low_rate, bf16_rate = sustained_flops(gpu_type, dtype), sustained_flops(gpu_type, "bf16")
    if low_rate is None or bf16_rate is None:
        return None
    limit = (low + bf16) / (low / low_rate + bf16 / bf16_rate)
    return Limit(name="compute", needed=(low + bf16) * per_s / TERA, limit=limit / TERA, unit="TFLOP/s/GPU")


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
    return per_mac * low, per_mac * (macs["lm_head"] + scores)
