"""What all parts of `outofcore_gpu.py` share: the device, rates, the host slab."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from device import gpu_of, let_go, machine_of
from findings import Findings
from outofcore_rows import Row

from llmb.config.spec import Model
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.offload import machine_probe
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel import hardware
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.report.plan_text import describe_rates

PROBE_S = 4.0  # of the longest measurement of a rate


@dataclass(kw_only=True)
class Bench(Findings):
    """One run of the program."""

    device: torch.device
    models: dict[str, Model]
    rows: tuple[Row, ...]
    steps: int  # that count, of each row
    tiny: bool
    profile: Path | None  # a folder for the first row's; none: it is not profiled

    @property
    def machine(self) -> str:
        return machine_of(self.device)

    @property
    def gpu(self) -> str:
        """A key of hardware.GPUS."""
        return gpu_of(self.device)

    @property
    def peak(self) -> float | None:
        """FLOP/s in bf16."""
        return hardware.peak_flops(self.gpu, "bf16")

    def rates(self) -> Rates:
        """What the device sustains, measured as `llmb-run probe` does, for a shorter time."""
        found = measured_rates(self.gpu, self.device, self.tiny)
        let_go(self.device)
        self.head("Rates of this machine, measured")
        print(describe_rates(asdict(found)), flush=True)
        self.keep("rates", asdict(found))
        return found

    def slab(self, size: int) -> HostSlab:
        """Host memory for all rows, locked once."""
        began = time.perf_counter()
        slab = HostSlab(size, self.device)
        seconds = time.perf_counter() - began
        self.head(f"{size / hardware.GIB:.4g} GiB of host memory taken and locked in {seconds:.1f} s")
        self.keep("slab", {"bytes": size, "seconds": seconds})
        return slab


@torch.no_grad()
def measured_rates(gpu: str, device: torch.device, tiny: bool) -> Rates:
    """All that a plan in bf16 goes by."""
    torch.manual_seed(0)
    usual = machine_probe.ON_GPU if device.type == "cuda" else machine_probe.ON_CPU
    sizes = replace(usual, seconds=0.06 if tiny else PROBE_S)
    attention = {name: rate / hardware.TERA for name, rate in machine_probe.attention_rates(device, sizes).items()}
    link = {name: rate / hardware.GB for name, rate in machine_probe.link_rates(device, sizes).items()}
    return Rates(
        gpu=gpu,
        matmul_tflops=machine_probe.gemm_rate(LinearGemms(), device, sizes) / hardware.TERA,
        **attention,
        square_tokens=sizes.square_tokens,
        memory_gbs=machine_probe.memory_rate(device, sizes) / hardware.GB,
        **link,
        source="measured in this process",
    )
