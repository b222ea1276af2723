"""How fast a machine computes and copies: what `llmb-run probe` measured here, or known figures of its GPU.

All are what long runs sustain, not peaks: a chip that runs out of power slows its clock within seconds. Attention has
two speeds each way: of a chunk's own keys, in causal squares, and of the keys before the chunk, in rectangles.
"""

from dataclasses import dataclass
from pathlib import Path

from llmb.config.serialization import build, read_json
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import gpu as hardware_of


@dataclass(frozen=True, kw_only=True)
class Rates:
    """TFLOP/s are 1e12 FLOPs a second, GB/s 1e9 bytes."""

    gpu: str  # a key of hardware.GPUS
    matmul_tflops: float  # bf16, or fp32 on a CPU
    fp8_tflops: float | None = None  # null: not measured, or the device has none
    attention_forward_tflops: float  # a chunk's own keys: causal squares of `square_tokens`
    attention_backward_tflops: float
    square_tokens: int
    past_attention_forward_tflops: float  # keys before the chunk, which are all seen; adding their part is counted
    past_attention_backward_tflops: float
    memory_gbs: float  # read and written
    link_in_gbs: float  # host to device
    link_out_gbs: float
    link_both_gbs: float  # each way, when both are busy
    source: str  # measured when and where, or whose figures these are


# What was measured on an H200 of 700 W in runs of many seconds. Other GPUs: the same shares of their own peaks.
H200 = Rates(
    gpu="h200", matmul_tflops=685.0, fp8_tflops=1220.0,
    attention_forward_tflops=513.0, attention_backward_tflops=427.0, square_tokens=8192,
    past_attention_forward_tflops=576.0, past_attention_backward_tflops=525.0,
    memory_gbs=4100.0, link_in_gbs=54.5, link_out_gbs=54.5, link_both_gbs=46.2,
    source="sustained on an H200 of 700 W",
)  # fmt: skip
# For plans of stand-ins on a CPU, where the order of magnitude decides well enough; nothing is predicted from them.
NOMINAL_CPU = Rates(
    gpu="cpu", matmul_tflops=0.05, attention_forward_tflops=0.02, attention_backward_tflops=0.02, square_tokens=128,
    past_attention_forward_tflops=0.02, past_attention_backward_tflops=0.02, memory_gbs=10.0, link_in_gbs=5.0,
    link_out_gbs=5.0, link_both_gbs=4.0, source="nominal",
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
        square_tokens=H200.square_tokens,
        past_attention_forward_tflops=H200.past_attention_forward_tflops * computing,
        past_attention_backward_tflops=H200.past_attention_backward_tflops * computing,
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
    if not path.exists():
        return known_rates(gpu)
    try:
        return build(Rates, read_json(path), f"{path}")
    except ConfigError as error:  # damaged, or measured before a rate was asked for
        raise ConfigError(f"{error}; run `llmb-run probe` again, which measures this machine anew") from error
