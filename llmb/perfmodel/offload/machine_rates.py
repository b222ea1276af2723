"""Rates at which a machine computes and copies: measured here by `llmb-run probe`, or known figures of its GPU.

All are sustained rates, not peaks: a power-limited GPU lowers its clock within seconds. Attention has two rates per
direction: for a chunk's own keys, in causal squares, and for the keys before the chunk, in rectangles.
"""

import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.config.serialization import build, read_json
from llmb.config.spec import Ceilings
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import gpu as hardware_of
from llmb.perfmodel.hardware import is_listed

NOMINAL_DISK_GBS = 2.0
DETAILS = "details"  # key of everything else that the probe stores beside the rates


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates. TFLOP/s are 1e12 FLOPs per second, GB/s 1e9 bytes per second."""

    gpu: str  # a key of hardware.GPUS, or the name of a GPU that is not in it
    matmul_tflops: float  # bf16, or fp32 on a CPU
    fp8_tflops: float | None = None  # null: not measured, or the device has none
    attention_forward_tflops: float  # a chunk's own keys: causal squares of `square_tokens`
    attention_backward_tflops: float
    square_tokens: int
    past_attention_forward_tflops: float  # keys before the chunk, all visible; includes merging the results
    past_attention_backward_tflops: float
    memory_gbs: float  # read and written
    link_in_gbs: float  # host to device
    link_out_gbs: float
    link_both_gbs: float  # per direction, when both are busy
    disk_read_gbs: float | None = None  # of the disk tier's folder; null: not measured and not stated
    disk_write_gbs: float | None = None
    disk_both_gbs: float | None = None  # per direction, when both are busy
    bus_gbs: float | None = None  # bus bandwidth among the GPUs of a node; null: not measured, or one GPU
    device_memory_bytes: float | None = None  # as its driver reports it; null: not stored by an older version
    source: str  # when and where measured, or whose figures these are

    @property
    def disk_gbs(self) -> tuple[float, float, float]:
        """Rates of reading, of writing, and per direction of both; unknown ones as an SSD has them, to plan with."""
        return tuple(rate or NOMINAL_DISK_GBS for rate in (self.disk_read_gbs, self.disk_write_gbs, self.disk_both_gbs))  # type: ignore[return-value]

    def with_disk(self, gbs: float) -> "Rates":
        """Return the rates with those of a stated disk, the same each way."""
        source = f"{self.source}; a disk of {gbs:g} GB/s as stated"
        return replace(self, disk_read_gbs=gbs, disk_write_gbs=gbs, disk_both_gbs=gbs, source=source)


# Measured on an H200 of 700 W in runs of many seconds. Other GPUs: the same fractions of their own peaks.
H200 = Rates(
    gpu="h200", matmul_tflops=685.0, fp8_tflops=1220.0,
    attention_forward_tflops=513.0, attention_backward_tflops=427.0, square_tokens=8192,
    past_attention_forward_tflops=576.0, past_attention_backward_tflops=525.0,
    memory_gbs=4100.0, link_in_gbs=54.5, link_out_gbs=54.5, link_both_gbs=46.2,
    source="sustained on an H200 of 700 W",
)  # fmt: skip
# For plans of proxies on a CPU, where the order of magnitude suffices; nothing is predicted from them.
NOMINAL_CPU = Rates(
    gpu="cpu", matmul_tflops=0.05, attention_forward_tflops=0.02, attention_backward_tflops=0.02, square_tokens=128,
    past_attention_forward_tflops=0.02, past_attention_backward_tflops=0.02, memory_gbs=10.0, link_in_gbs=5.0,
    link_out_gbs=5.0, link_both_gbs=4.0, source="nominal",
)  # fmt: skip


def nominal_rates(gpu: str) -> Rates | None:
    """Return rates that suffice for a plan and predict nothing: of a CPU, or of a GPU that is not in the table."""
    if gpu == "cpu":
        return NOMINAL_CPU
    if is_listed(gpu):
        return None
    return replace(H200, gpu=gpu, source=f"nominal: an H200's, as {gpu} was not measured; `llmb-run probe` does that")


def known_rates(gpu: str) -> Rates:
    """Return the figures of a GPU that was not measured here."""
    nominal = nominal_rates(gpu)
    if nominal is not None or gpu == "h200":
        return nominal or H200
    target, base = hardware_of(gpu), hardware_of("h200")
    assert target.memory_bandwidth is not None  # complete rows: tests/perfmodel/test_hardware.py
    assert target.host_bandwidth is not None
    assert base.memory_bandwidth is not None
    assert base.host_bandwidth is not None
    compute = target.peak_flops["bf16"] / base.peak_flops["bf16"]
    link = target.host_bandwidth / base.host_bandwidth
    fp8 = target.peak_flops.get("fp8")
    return Rates(
        gpu=gpu,
        matmul_tflops=H200.matmul_tflops * compute,
        fp8_tflops=None if fp8 is None or H200.fp8_tflops is None else H200.fp8_tflops * fp8 / base.peak_flops["fp8"],
        attention_forward_tflops=H200.attention_forward_tflops * compute,
        attention_backward_tflops=H200.attention_backward_tflops * compute,
        square_tokens=H200.square_tokens,
        past_attention_forward_tflops=H200.past_attention_forward_tflops * compute,
        past_attention_backward_tflops=H200.past_attention_backward_tflops * compute,
        memory_gbs=H200.memory_gbs * target.memory_bandwidth / base.memory_bandwidth,
        link_in_gbs=H200.link_in_gbs * link,
        link_out_gbs=H200.link_out_gbs * link,
        link_both_gbs=H200.link_both_gbs * link,
        source=f"from the peaks of {target.title}, at the fractions that an H200 sustains",
    )


def rates_path(install: Path, gpu: str) -> Path:
    """Return where the probe stores its measurements: of the last machine with this GPU."""
    return install / ".llmb" / "rates" / f"{gpu}.json"


def machine_path(install: Path, gpu: str, host: str) -> Path:
    """Return where the probe stores its measurements of one machine."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:100]
    return rates_path(install, f"{gpu}@{name}")


def measured_rates(gpu: str, install: Path) -> Rates | None:
    """Return the rates that `probe` measured on this machine, or on the last one with this GPU; None: on none."""
    paths = (machine_path(install, gpu, socket.gethostname()), rates_path(install, gpu))
    path = next((path for path in paths if path.exists()), None)
    return None if path is None else read_rates(path)


def read_rates(path: Path) -> Rates:
    """Read the rates of a file that the probe wrote, of this or an older version."""
    try:
        data = read_json(path)
        values = {name: value for name, value in data.items() if name != DETAILS} if isinstance(data, dict) else data
        return build(Rates, values, f"{path}")
    except ConfigError as error:  # damaged, or measured before a rate was added
        raise ConfigError(f"{error}; run `llmb-run probe` again, which measures this machine anew") from error


def measured_ceilings(gpu: str, install: Path) -> Ceilings | None:
    """Return the measured rates that results stand beside; None: `probe` has not run."""
    rates = measured_rates(gpu, install)
    if rates is None:
        return None
    return Ceilings(
        matmul_tflops=rates.matmul_tflops,
        fp8_tflops=rates.fp8_tflops,
        memory_gbs=rates.memory_gbs,
        source=rates.source,
    )


def rates_of(gpu: str, install: Path) -> Rates:
    """Return the rates measured on this machine, else the known ones of the GPU."""
    return measured_rates(gpu, install) or known_rates(gpu)
