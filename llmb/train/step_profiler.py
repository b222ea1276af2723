"""Profile of a few steps with torch's profiler, and the time of a step by kind of kernel.

    llmb-run submit ... -p        steps profile_start up to, not including, profile_stop

Each rank writes profile/trace.rank<N>.json.gz (open it in chrome://tracing or ui.perfetto.dev); rank 0 also writes
profile/time.json. Steps and their phases are annotated in the trace and, on a GPU, as NVTX ranges. Under Nsight Systems
(`llmb/runtime/profile_window.py`) its capture range covers the same steps instead.

On a GPU the times are those of the kernels on all streams. Where several overlap the first of KINDS counts, so
communication is exposed communication; idle is time without a kernel. On a CPU they are the self times of torch's
operators, and idle is the Python between them.
"""

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from llmb.config.serialization import to_json, write_atomic
from llmb.config.spec import Profile
from llmb.errors import LaunchError
from llmb.events import TimeSpent
from llmb.runtime.profile_window import NsightWindow, is_under_nsight, profiled_steps
from llmb.runtime.rank_info import RankInfo
from llmb.train.kernel_intervals import KernelInterval, clip, resolve_nesting, resolve_overlaps

MATMUL, ATTENTION, OPTIMIZER = "matrix products", "attention", "optimizer"
MEMORY, COMMUNICATION, IDLE = "memory-bound work", "communication", "idle"
KINDS = (MATMUL, ATTENTION, OPTIMIZER, MEMORY, COMMUNICATION, IDLE)

# Patterns of the names of GPU kernels, torch operators and our annotations, by kind; the first match decides.
# Names without a match are memory-bound: elementwise kernels, norms, copies.
KERNEL_PATTERNS = (
    (MEMORY, r"^triton_(poi|red|per)_"),  # Inductor names list all fused operators, even adjacent matmuls
    (COMMUNICATION, r"nccl|\bgloo|c10d|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
    (OPTIMIZER, r"^optimizer$|^optimizer\.|multi_tensor|adam|aten::_foreach"),
    (ATTENTION, r"flash|fmha|sdpa|attention|attn|scaled_?dot_?product"),
    (MATMUL, r"gemm|gemv|nvjet|cutlass|cublas|xmma|matmul|split_?k_?reduce|_mm\b|_mm_|\bb?mmbackward"),
    (MATMUL, r"^aten::(mm|addmm|bmm|baddbmm|linear|mv|addmv|dot|einsum)$"),
)
SOURCES = {"cuda": "GPU kernels", "cpu": "own times of CPU operations; idle is Python between them"}  # by device
TOP_KERNELS = 20  # listed in time.json

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else Kineto prints to stderr


def kernel_kind(name: str) -> str | None:
    """Return the kind of a kernel or operator by its name; None if no pattern matches."""
    return next((kind for kind, pattern in KERNEL_PATTERNS if re.search(pattern, name, re.IGNORECASE)), None)


class Profiler:
    """Profiler of some steps of a run: call `before_step` and `after_step`; no overhead outside the window."""

    def __init__(self, folder: Path, settings: Profile, steps: range, mesh: RankInfo):
        self._folder, self._mesh = folder / "profile", mesh
        profiles_rank = not settings.profile_ranks or mesh.rank in settings.profile_ranks
        self._steps = profiled_steps(settings, steps) if profiles_rank else range(0)
        self._nsight = NsightWindow(self._steps) if is_under_nsight() else None
        # Kineto is slow at first: if there is a step before the window it warms up there.
        self._warms_up = bool(self._steps) and self._steps[0] > steps[0]
        self._trace: profile | None = None

    def before_step(self, step: int) -> None:
        """Start the trace at the beginning of the window."""
        if self._nsight is not None:
            self._nsight.before(step)
        elif self._steps and step == self._steps[0] - self._warms_up:
            activities = [ProfilerActivity.CPU]
            if self._mesh.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            warmup = schedule(wait=0, warmup=1, active=len(self._steps), repeat=1) if self._warms_up else None
            self._trace = profile(activities=activities, schedule=warmup)
            self._trace.start()

    def trace_range(self, name: str) -> AbstractContextManager[None]:
        """Return a context that annotates a range of a step in the trace."""
        active = self._trace is not None or (self._nsight is not None and self._nsight.is_open)
        return self._annotate(name) if active else nullcontext()

    @contextmanager
    def _annotate(self, name: str) -> Iterator[None]:
        on_gpu = self._mesh.device.type == "cuda"
        with record_function(name):
            if on_gpu:
                torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                if on_gpu:
                    torch.cuda.nvtx.range_pop()

    def after_step(self, step: int) -> tuple[TimeSpent, ...]:
        """Write the files after the last profiled step; return the time by kind on rank 0, else nothing."""
        if self._nsight is not None:
            self._nsight.after(step)
        if self._trace is None:
            return ()
        if step != self._steps[-1]:
            self._trace.step()
            return ()
        trace, self._trace = self._trace, None
        trace.stop()
        path = self._folder / f"trace.rank{self._mesh.rank}.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(path))
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}") from error
        if self._mesh.rank != 0:
            return ()
        with gzip.open(path) as file:
            report = summarize_trace(json.load(file)["traceEvents"], self._mesh.device.type)
        write_atomic(self._folder / "time.json", to_json({"steps": list(self._steps), **report}, indent=1))
        return tuple(TimeSpent(**row) for row in report["time_spent"])


def summarize_trace(events: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return the seconds per step of each kind, and the longest kernels, from the events of a Chrome trace."""
    timed = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in timed if e.get("cat") == "user_annotation" and re.fullmatch(r"step \d+", e["name"])]
    windows = sorted((step["ts"], step["ts"] + step["dur"]) for step in steps)
    if device == "cuda":
        kernels = [_interval(e, MEMORY) for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        intervals = resolve_overlaps(kernels, KINDS)
    else:
        main_thread = [e for e in timed if e["tid"] == steps[0]["tid"]]
        calls = [_interval(e, MEMORY) for e in main_thread if e.get("cat") == "cpu_op"]
        annotations = [_interval(e, IDLE) for e in main_thread if e.get("cat") == "user_annotation"]
        intervals = resolve_nesting(calls + annotations)
    wall = sum(end - start for start, end in windows)
    spent = dict.fromkeys(KINDS, 0.0)
    by_name: dict[tuple[str, str], float] = {}
    for interval in clip(intervals, windows):
        if interval.kind != IDLE:
            duration = interval.end - interval.start
            spent[interval.kind] += duration
            by_name[interval.kind, interval.name] = by_name.get((interval.kind, interval.name), 0.0) + duration
    spent[IDLE] = max(0.0, wall - sum(spent.values()))
    per_step = 1e-6 / len(windows)  # traces are in microseconds
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:TOP_KERNELS]
    return {
        "source": SOURCES[device],
        "step_s": wall * per_step,
        "time_spent": [
            {"kind": kind, "seconds_per_step": time * per_step, "share": time / wall} for kind, time in spent.items()
        ],
        "longest": [
            {"kind": kind, "name": name, "seconds_per_step": time * per_step} for (kind, name), time in longest
        ],
    }


def format_time_spent(rows: Sequence[TimeSpent], source: str) -> str:
    """Return the table of time by kind for the log."""
    lines = [f"{row.kind:<20} {row.seconds_per_step:12.6f} {row.share:9.1%}" for row in rows]
    return "\n".join([f"{'where the time went':<20} {'s per step':>12} {'fraction':>9}  ({source})", *lines])


def _interval(event: dict[str, Any], default: str) -> KernelInterval:
    kind = kernel_kind(event["name"])
    start, end = event["ts"], event["ts"] + event["dur"]
    return KernelInterval(start, end, kind or default, event["name"], decided=kind is not None)
