"""Shared state of the parts of `outofcore_gpu.py` and of `lora_gpu.py`: device, rates, host slab."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from measure.device import DeviceReport, release_memory

from llmb.config.model import Model
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.offload import machine_probe
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel import hardware
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.report.plan_text import describe_rates
from outofcore.outofcore_rows import Row, models, tiny_models, tiny_row

PROBE_S = 4.0  # of the longest measurement of a rate


@dataclass(kw_only=True)
class Bench(DeviceReport):
    """One run of the program."""

    models: dict[str, Model]
    rows: tuple[Row, ...]
    steps: int  # that count, of each row
    tiny: bool
    profile: Path | None  # a folder for the first row's; none: it is not profiled

    @classmethod
    def of(cls, options: argparse.Namespace, rows: Sequence[Row], profile: Path | None = None) -> "Bench":
        """Return the run that a command line asks for, and print its machine."""
        bench = cls(
            device=torch.device("cpu") if options.tiny else torch.device("cuda", 0),
            models=tiny_models() if options.tiny else models(),
            rows=tuple(tiny_row(row) if options.tiny else row for row in rows),
            steps=options.steps,
            tiny=options.tiny,
            json=options.json,
            profile=profile,
        )
        print(bench.machine, flush=True)
        bench.record("machine", bench.machine)
        return bench

    def rates(self) -> Rates:
        """Measure the sustained rates of the device as `llmb-run probe` does, for a shorter time."""
        measured = measured_rates(self.gpu, self.device, self.tiny)
        release_memory(self.device)
        self.print_heading("Rates of this machine, measured")
        print(describe_rates(asdict(measured)), flush=True)
        self.record("rates", asdict(measured))
        return measured

    def slab(self, size: int) -> HostSlab:
        """Pin host memory for all rows, once."""
        began = time.perf_counter()
        slab = HostSlab(size, self.device)
        seconds = time.perf_counter() - began
        self.print_heading(f"{size / hardware.GIB:.4g} GiB of host memory allocated and pinned in {seconds:.1f} s")
        self.record("slab", {"bytes": size, "seconds": seconds})
        return slab


@torch.no_grad()
def measured_rates(gpu: str, device: torch.device, tiny: bool) -> Rates:
    """Return the rates that a plan in bf16 needs."""
    torch.manual_seed(0)
    usual = machine_probe.ON_GPU if device.type == "cuda" else machine_probe.ON_CPU
    sizes = replace(usual, seconds=0.06 if tiny else PROBE_S)
    attention = {name: m.rate / hardware.TERA for name, m in machine_probe.attention_rates(device, sizes).items()}
    link = {name: m.rate / hardware.GB for name, m in machine_probe.link_rates(device, sizes).items()}
    return Rates(
        gpu=gpu,
        matmul_tflops=machine_probe.gemm_rate(LinearGemms(), device, sizes).rate / hardware.TERA,
        **attention,
        square_tokens=sizes.square_tokens,
        memory_gbs=machine_probe.memory_rate(device, sizes).rate / hardware.GB,
        **link,
        source="measured in this process",
    )
