"""Out-of-core training with state and weights on disk, beside the disk's own rates, the prediction, and memory alone.

    python bench/outofcore_disk.py --disk-path /nvme/scratch [--json FILE] [--row 20/24] [--steps 3]
    python bench/outofcore_disk.py --disk-path /tmp           # without a GPU: a proxy of 16 layers, and says so
    python bench/outofcore_disk.py --disk-path /tmp --tiny    # a very small model: shows only that it runs

The ceiling is the same file, block size and queue depth with nothing else to do: read alone, written alone, and both at
once. A row has two steps to warm up, which write each bucket once. Its bytes are those of the steps that count, its
rate is that of the time in which the disk was read or written. All rows have the same losses, or the program fails.
Last come predictions for an H200 with a stated disk.
"""

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from measure.device import DeviceReport, release_memory
from measure.options import select_rows
from outofcore.outofcore_bench import measured_rates
from outofcore.outofcore_rows import models, tiny_models
from outofcore.outofcore_training import Order, Trained, train

from llmb.config.model import Model
from llmb.config.offload_plan import PlanConstraints
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.offload import machine_probe
from llmb.offload.arena import Budgets
from llmb.offload.disk.disk_file import BLOCK_BYTES, QUEUE_DEPTH, buffered_line
from llmb.offload.disk.disk_probe import DiskSizes, disk_rates
from llmb.offload.pinned_memory import HostSlab
from llmb.ops.optim.adam import adam_update
from llmb.perfmodel.hardware import GB, GIB, TERA
from llmb.perfmodel.offload.buffers import ParamBuckets, bytes_on_disk
from llmb.perfmodel.offload.machine_rates import Rates, known_rates
from llmb.perfmodel.offload.plan_candidate import PlanResult
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.perfmodel.offload.stream_timeline import DISK_STREAMS
from llmb.perfmodel.offload.task_durations import TaskDurations
from llmb.report.timeline.tracks import total, union
from llmb.runtime.probe.repeated_calls import repeat_calls

WARM_UP = 2  # steps: the second is the first that reads optimizer state
STATED_GBS = 7.0  # of the disk that is predicted: what NVMe SSDs of PCIe 4 are sold with
PREDICTED = ((60, 24, 0), (30, 24, 100), (20, 24, 100), (12, 24, 100))  # GiB of host, device and disk; 8b, 8,192 tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; budgets in GiB."""

    host_gib: float
    device_gib: float
    disk_gib: float
    seqlen: int
    gbs: int
    dtype: Literal["bf16", "fp32"] = "bf16"
    chunk_tokens: int | None = None
    seqs_per_round: int | None = None
    resident_params: int | None = None
    resident_grads: int | None = None
    resident_states: int | None = None

    @property
    def title(self) -> str:
        return f"{self.host_gib:.4g}/{self.device_gib:.4g}"

    @property
    def constraints(self) -> PlanConstraints:
        return PlanConstraints(**asdict(self))


def gpu_rows() -> tuple[Model, tuple[Row, ...]]:
    return models()["8b"], tuple(
        Row(host_gib=host, device_gib=24, disk_gib=disk, seqlen=8192, gbs=16)
        for host, disk in ((60, 0), (30, 64), (20, 64), (12, 64))
    )


def proxy_rows() -> tuple[Model, tuple[Row, ...]]:
    """Few tokens, many rounds and resident gradients, so that a CPU waits for weights on disk as a GPU would."""
    shape = {"layers": 8, "hidden": 512, "ffn": 1792, "heads": 8, "kv_heads": 4, "head_dim": 64, "vocab": 4096}
    model = replace(models()["8b"], name="proxy of Llama 8B with 8 narrow layers", **shape)
    work: dict[str, Any] = {"seqlen": 4, "gbs": 32, "dtype": "fp32", "chunk_tokens": 4, "seqs_per_round": 1}
    work |= {"resident_params": 0, "resident_grads": 10, "resident_states": 0}
    return model, tuple(
        Row(host_gib=host, device_gib=0.5, disk_gib=disk, **work) for host, disk in ((2.0, 0), (0.3, 4), (0.2, 4))
    )


def tiny_rows() -> tuple[Model, tuple[Row, ...]]:
    mib = 1 / 1024
    return replace(tiny_models()["8b"], layers=12), tuple(
        Row(host_gib=host * mib, device_gib=2 * mib, disk_gib=disk, seqlen=64, gbs=1, dtype="fp32", chunk_tokens=64)
        for host, disk in ((12, 0), (5, 1), (2, 1))
    )


@dataclass(kw_only=True)
class DiskBench(DeviceReport):
    """One run of the program."""

    model: Model
    row: Row  # the first: the others differ in their budgets only
    folder: Path
    steps: int
    tiny: bool

    def rates(self) -> Rates:
        """Measure the device, then the disk with transfers as large as a bucket's state."""
        measured = measured_rates(self.gpu, self.device, self.tiny)
        if self.device.type == "cpu":
            measured = self._at_shapes(measured)
        release_memory(self.device)
        transfer = bytes_on_disk(ParamBuckets(self.model).bucket_numel * (8 if self.row.dtype == "fp32" else 4))
        size = max(8 * transfer, 16 << 20 if self.tiny else 2 << 30)
        sizes = DiskSizes(transfer=transfer, file=size, seconds=0.1 if self.tiny else 4.0)
        disk = {name: each.rate / GB for name, each in disk_rates(self.folder, sizes).items()}
        line = buffered_line(self.folder) or f"{self.folder} takes O_DIRECT"
        self.print_table(
            f"{line}; {QUEUE_DEPTH} blocks of {BLOCK_BYTES >> 20} MiB in flight per direction, transfers of "
            f"{transfer / 2**20:.3g} MiB in a file of {size / GIB:.3g} GiB",
            ("disk alone", "GB/s"),
            [("read", disk["disk_read_gbs"]), ("written", disk["disk_write_gbs"]),
             ("each way, both at once", disk["disk_both_gbs"])],
        )  # fmt: skip
        self.record("disk", disk)
        return replace(measured, **disk)

    def _at_shapes(self, rates: Rates) -> Rates:
        """Return the rates of a CPU at the proxy's own shapes: GEMMs of few tokens, and the optimizer's reference."""
        model, tokens = self.model, self.row.seqlen
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        shapes = [(tokens, width + 2 * kv_width, model.hidden), (tokens, model.hidden, width),
                  (tokens, 2 * model.ffn, model.hidden), (tokens, model.hidden, model.ffn)]  # fmt: skip
        sizes = replace(machine_probe.ON_CPU, seconds=0.06 if self.tiny else 2.0)
        gemms = machine_probe.gemm_rate(LinearGemms(), self.device, sizes, shapes).rate / TERA
        durations = TaskDurations(model, best_plan(model, self.row.constraints, rates).plan, rates)
        weights, grads, m, v = torch.zeros(4, ParamBuckets(model).bucket_numel).unbind()
        step = partial(adam_update, weights, grads, m, v, None, lr=1e-6, beta1=0.9, beta2=0.95, eps=1e-8,
                       weight_decay=0.1, step=1, factor=torch.ones(()), rounding="nearest", seed=1)  # fmt: skip
        update = repeat_calls(step, self.device, sizes.seconds, durations.update.memory_bytes)
        return replace(rates, matmul_tflops=gemms, memory_gbs=update.rate / GB)

    def run_row(self, row: Row, rates: Rates) -> tuple[PlanResult, Trained]:
        """Plan a row and train."""
        result = best_plan(self.model, row.constraints, rates)
        order = Order(
            budgets=Budgets(host_gib=row.host_gib, device_gib=row.device_gib, disk_gib=row.disk_gib),
            warm_up=WARM_UP,
            steps=self.steps,
            watch_all=True,
            link_gbs=(rates.link_in_gbs, rates.link_out_gbs),
            peak_tflops=None,
            disk_path=str(self.folder),
        )
        in_memory = sum(size for kind, size in result.host_bytes.items() if kind != "staging")
        trained = train(self.model, result, order, self.device, HostSlab(in_memory, self.device))
        release_memory(self.device)
        return result, trained


@dataclass(frozen=True)
class DiskUse:
    """Transfers of the steps that count."""

    read: float  # bytes a step
    written: float
    busy_s: float  # a step, reading or writing or both

    @classmethod
    def of(cls, trained: Trained) -> "DiskUse":
        steps = len(trained.seconds)
        events = [event for event in trained.streams.events if event.stream in DISK_STREAMS]
        busy = total(union(sorted((event.start, event.end) for event in events)))
        read, written = (sum(e.bytes for e in events if e.stream == stream) / steps for stream in DISK_STREAMS)
        return cls(read, written, busy / steps)

    def least_s(self, rates: Rates) -> float:
        """Seconds for the same bytes with nothing else to do, in the faster order: both ways at once, or in turns."""
        read_gbs, write_gbs, both_gbs = rates.disk_gbs
        in_turns = self.read / read_gbs + self.written / write_gbs
        longer, gbs = (self.read, read_gbs) if self.read > self.written else (self.written, write_gbs)
        shorter = min(self.read, self.written)
        return min(in_turns, shorter / both_gbs + (longer - shorter) / gbs) / GB


def rows(bench: DiskBench, selected: tuple[Row, ...], rates: Rates) -> bool:
    """Train each row and print the table; returns whether all have the same losses."""
    lines, losses = [], []
    for row in selected:
        result, trained = bench.run_row(row, rates)
        plan, use = result.plan, DiskUse.of(trained)
        least_s, predicted_s, step_s = use.least_s(rates), result.simulation.step_s, median(trained.seconds)
        placed = f"{plan.disk_states} of state, {plan.disk_params} of weights"
        disk = (None,) * 4
        if plan.uses_disk:
            moved = use.read + use.written
            disk = use.read / GB, use.written / GB, moved / use.busy_s / GB, least_s / use.busy_s
            planned = result.simulation.disk_read_bytes, result.simulation.disk_write_bytes
            assert planned == (use.read, use.written), f"planned {planned} bytes, transferred {use}"
        lines.append((row.title, placed, *disk, step_s, predicted_s, predicted_s / step_s))
        losses.append(trained.losses)
        bench.record("rows", {
            "row": asdict(row), "plan": asdict(plan), "seconds": trained.seconds, "losses": trained.losses,
            "host_bytes": trained.host_bytes, "disk_bytes": result.disk_bytes, "read_bytes": use.read,
            "written_bytes": use.written, "busy_s": use.busy_s, "least_s": least_s, "predicted_s": predicted_s,
            "ratio_of_ceiling": least_s / use.busy_s if plan.uses_disk else None,
        })  # fmt: skip
    bench.print_table(
        f"{bench.model.name}, {selected[0].seqlen} tokens a sequence, {selected[0].gbs} a step, {selected[0].dtype}",
        ("host/device GiB", "buckets on disk", "GB read", "GB written", "GB/s while busy", "of the ceiling", "step s",
         "predicted s", "predicted/measured"),
        lines,
        "of the ceiling: time for the same bytes by the disk alone, both ways at once or in turns, over the time busy",
    )  # fmt: skip
    same = all(each == losses[0] for each in losses)
    print("losses: the same in all rows, bit for bit" if same else f"losses DIFFER: {losses}", flush=True)
    return same


def predict(bench: DiskBench) -> None:
    """Predict 8b on an H200 with the stated disk."""
    model, lines = models()["8b"], []
    rates = known_rates("h200").with_disk(STATED_GBS)
    for host, device, disk in PREDICTED:
        constraints = PlanConstraints(dtype="bf16", seqlen=8192, host_gib=host, device_gib=device, disk_gib=disk)
        result = best_plan(model, constraints, rates)
        plan, simulation = result.plan, result.simulation
        placed = f"{plan.disk_states} of state, {plan.disk_params} of weights"
        speed = plan.step_tokens / simulation.step_s
        lines.append((f"{host}/{device}", placed, simulation.disk_read_bytes / GB, simulation.step_s, speed))
        bench.record(
            "predicted", {"host_gib": host, "device_gib": device, "tokens_per_s": speed, "rates": rates.source}
        )
    bench.print_table(
        f"Predicted, not measured: Llama 8b, 8,192 tokens, {rates.source}",
        ("host/device GiB", "buckets on disk", "GB read", "step s", "tokens/s"),
        lines,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk-path", type=Path, required=True, metavar="FOLDER", help="on the disk to be used")
    parser.add_argument("--row", default="", help="only rows with one of these in their title")
    parser.add_argument("--steps", type=int, default=5, help="steps of a row that count; the median is given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.disk_path.is_dir() or not os.access(options.disk_path, os.W_OK):
        parser.error(f"--disk-path {options.disk_path} is no folder that can be written")
    has_gpu = torch.cuda.is_available() and not options.tiny
    model, listed = tiny_rows() if options.tiny else gpu_rows() if has_gpu else proxy_rows()
    if not (selected := select_rows(listed, options.row)):
        parser.error(f"no row is called {options.row}; rows are: {', '.join(row.title for row in listed)}")
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    bench = DiskBench(
        device=device, json=options.json, model=model, row=listed[0], folder=options.disk_path, steps=options.steps,
        tiny=options.tiny,
    )  # fmt: skip
    busy = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{bench.machine}, {busy}{'' if has_gpu else '; a proxy on a CPU'}", flush=True)
    bench.record("machine", bench.machine)
    same = rows(bench, selected, bench.rates())
    if not options.tiny:
        predict(bench)
    print(f"\n{time.perf_counter() - bench.began:.0f} seconds in all")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
