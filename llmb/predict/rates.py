"""How fast a machine computes and copies: what `llmb-run probe` measured here, or known figures of its GPU.

All are what long runs sustain, not peaks: a chip that runs out of power slows its clock within seconds.
"""

from dataclasses import dataclass
from pathlib import Path

from llmb.errors import ConfigError
from llmb.hardware import gpu as hardware_of
from llmb.plain import build, read_json


@dataclass(frozen=True, kw_only=True)
class Rates:
    """TFLOP/s are 1e12 FLOPs a second, GB/s 1e9 bytes."""

    gpu: str  # a key of hardware.GPUS
    matmul_tflops: float  # bf16, or fp32 on a CPU
    fp8_tflops: float | None = None  # null: not measured, or the device has none
    attention_forward_tflops: float
    attention_backward_tflops: float
    memory_gbs: float  # read and written
    link_in_gbs: float  # host to device
    link_out_gbs: float
    link_both_gbs: float  # each way, when both are busy
    source: str  # measured when and where, or whose figures these are


# What was measured on an H200 of 700 W in runs of many seconds. Other GPUs: the same shares of their own peaks.
H200 = Rates(
    gpu="h200", matmul_tflops=665.0, fp8_tflops=1220.0, attention_forward_tflops=590.0,
    attention_backward_tflops=520.0, memory_gbs=4300.0, link_in_gbs=55.2, link_out_gbs=55.3, link_both_gbs=50.4,
    source="sustained on an H200 of 700 W",
)  # fmt: skip
# For plans of stand-ins on a CPU, where the order of magnitude decides well enough; nothing is predicted from them.
NOMINAL_CPU = Rates(
    gpu="cpu", matmul_tflops=0.05, attention_forward_tflops=0.02, attention_backward_tflops=0.02, memory_gbs=10.0,
    link_in_gbs=5.0, link_out_gbs=5.0, link_both_gbs=4.0, source="nominal",
)  # fmt: skip


def known_rates(gpu: str) -> Rates:
    """The figures of a GPU that nobody has measured here."""
    if gpu in ("h200", "cpu"):
        return H200 if gpu == "h200" else NOMINAL_CPU
    this, like = hardware_of(gpu), hardware_of("h200")
    if this.memory_bandwidth is None or this.host_bandwidth is None or "bf16" not in this.peak_flops:
        raise ConfigError(f"no rates are known for {gpu}: `llmb-run probe` measures them on the machine itself")
    assert like.memory_bandwidth is not None
    assert like.host_bandwidth is not None
    computing = this.peak_flops["bf16"] / like.peak_flops["bf16"]
    link = this.host_bandwidth / like.host_bandwidth
    fp8 = this.peak_flops.get("fp8")
    return Rates(
        gpu=gpu,
        matmul_tflops=H200.matmul_tflops * computing,
        fp8_tflops=None if fp8 is None or H200.fp8_tflops is None else H200.fp8_tflops * fp8 / like.peak_flops["fp8"],
        attention_forward_tflops=H200.attention_forward_tflops * computing,
        attention_backward_tflops=H200.attention_backward_tflops * computing,
        memory_gbs=H200.memory_gbs * this.memory_bandwidth / like.memory_bandwidth,
        link_in_gbs=H200.link_in_gbs * link,
        link_out_gbs=H200.link_out_gbs * link,
        link_both_gbs=H200.link_both_gbs * link,
        source=f"from the peaks of {this.title}, at the shares that an H200 sustains",
    )


def rates_path(install: Path, gpu: str) -> Path:
    """Where the probe keeps what it measured."""
    return install / ".llmb" / "rates" / f"{gpu}.json"


def rates_of(gpu: str, install: Path) -> Rates:
    """What was measured on this machine; else what is known of the GPU."""
    path = rates_path(install, gpu)
    return build(Rates, read_json(path), f"{path}") if path.exists() else known_rates(gpu)
