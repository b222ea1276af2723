"""What all parts of `outofcore_gpu.py` share: the device, rates, the host slab, tables, the JSON file."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from outofcore_rows import Row
from outofcore_training import let_go

from llmb import hardware
from llmb.errors import LaunchError
from llmb.outofcore import probe
from llmb.outofcore.host_slab import HostSlab
from llmb.outofcore.products import Products
from llmb.predict.rates import Rates
from llmb.report.plan import describe_rates
from llmb.report.table import render
from llmb.spec import Model

PROBE_S = 4.0  # of the longest measurement of a rate


@dataclass
class Bench:
    """One run of the program."""

    device: torch.device
    models: dict[str, Model]
    rows: tuple[Row, ...]
    steps: int  # that count, of each row
    tiny: bool
    json: Path | None
    profile: Path | None  # a folder for the first row's; none: it is not profiled
    results: dict[str, list[Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @property
    def machine(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"

    @property
    def gpu(self) -> str:
        """A key of hardware.GPUS."""
        if self.device.type == "cpu":
            return "cpu"
        found = hardware.recognise(torch.cuda.get_device_name(self.device))
        if found is None:
            raise LaunchError(f"{self.machine}: a GPU of which no peak is known; see llmb/hardware.py")
        return found

    @property
    def peak(self) -> float | None:
        """FLOP/s in bf16."""
        return hardware.peak_flops(self.gpu, "bf16")

    def keep(self, part: str, *found: Any) -> None:
        """For the file; written each time, so that what was measured is there whatever follows."""
        self.results.setdefault(part, []).extend(found)
        if self.json:
            self.json.write_text(json.dumps(self.results, indent=1))

    def head(self, title: str) -> None:
        """A title with the seconds that have gone by."""
        print(f"\n{title}   [{time.perf_counter() - self.began:.0f} s]", flush=True)

    def say(self, title: str, header: Iterable[str], rows: Iterable[Iterable[Any]], *notes: str) -> None:
        """A table with its title, and what a reader must know of it."""
        self.head(title)
        print(render(list(header), [list(row) for row in rows]))
        print("".join(f"  {note}\n" for note in notes), end="", flush=True)

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
    usual = probe.ON_GPU if device.type == "cuda" else probe.ON_CPU
    sizes = replace(usual, seconds=0.06 if tiny else PROBE_S)
    forward, backward = probe.attention_rates(device, sizes)
    link = {name: rate / hardware.GB for name, rate in probe.link_rates(device, sizes).items()}
    return Rates(
        gpu=gpu,
        matmul_tflops=probe.products_rate(Products(), device, sizes) / hardware.TERA,
        attention_forward_tflops=forward / hardware.TERA,
        attention_backward_tflops=backward / hardware.TERA,
        memory_gbs=probe.memory_rate(device, sizes) / hardware.GB,
        **link,
        source="measured in this process",
    )
