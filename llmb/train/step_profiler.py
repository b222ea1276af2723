"""Where the time of a step goes, from a trace of a few steps: torch's profiler, and the one table that sorts its names.

    llmb-run submit ... -p        steps profile_start up to, not including, profile_stop

Each rank leaves profile/trace.rank<N>.json.gz (open it in chrome://tracing or ui.perfetto.dev); rank 0 also leaves
profile/time.json. While a trace is taken, steps and their parts are marked in it and, on a GPU, as NVTX ranges. Where
Nsight Systems watches instead (rank/nsight.py), its window is opened and closed around the same steps.

On a GPU the times are those of the kernels on all streams. Where several run at once the first kind of KINDS counts, so
communication is what no computation hides; idle is the time in which nothing runs. On a CPU they are the own times of
torch's operations, and idle is what passes between them, in Python.
"""

import gzip
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from llmb.config.serialization import to_json, write_whole
from llmb.config.spec import Profile
from llmb.errors import LaunchError
from llmb.events import TimeSpent
from llmb.runtime.nsight_window import NsightWindow, watched_by_nsight
from llmb.runtime.profile_window import profiled_steps
from llmb.train.kernel_intervals import Work, by_nesting, by_precedence, within
from llmb.train.parallel.mesh import Mesh

PRODUCTS, ATTENTION, OPTIMIZER = "matrix products", "attention", "optimizer"
MEMORY, COMMUNICATION, IDLE = "memory-bound work", "communication", "idle"
KINDS = (PRODUCTS, ATTENTION, OPTIMIZER, MEMORY, COMMUNICATION, IDLE)

# The names of GPU kernels, torch operations and our own marks, by kind; the first line that fits decides.
# What fits none is memory-bound: elementwise work, norms, copies.
NAMES = (
    (MEMORY, r"^triton_(poi|red|per)_"),  # a compiler's name lists all that it fused, even products near by
    (COMMUNICATION, r"nccl|\bgloo|c10d|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
    (OPTIMIZER, r"^optimizer$|^optimizer\.|multi_tensor|fused_?adam|aten::_foreach"),
    (ATTENTION, r"flash|fmha|sdpa|attention|attn|scaled_?dot_?product"),
    (PRODUCTS, r"gemm|gemv|nvjet|cutlass|cublas|xmma|matmul|split_?k_?reduce|_mm\b|_mm_|\bb?mmbackward"),
    (PRODUCTS, r"^aten::(mm|addmm|bmm|baddbmm|linear|mv|addmv|dot|einsum)$"),
)
SOURCES = {"cuda": "GPU kernels", "cpu": "own times of CPU operations; idle is Python between them"}  # by device
LONGEST = 20  # names listed in time.json

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the tracing library greets on stderr


def kind_of(name: str) -> str | None:
    """The kind of work a kernel or operation of this name does; none where the table does not say."""
    return next((kind for kind, pattern in NAMES if re.search(pattern, name, re.IGNORECASE)), None)


class Profiler:
    """Traces the asked steps of a run: call `before` and `after` each; outside of them it costs nothing."""

    def __init__(self, folder: Path, asked: Profile, steps: range, mesh: Mesh):
        self._folder, self._mesh = folder / "profile", mesh
        mine = not asked.profile_ranks or mesh.rank in asked.profile_ranks
        self._steps = profiled_steps(asked, steps) if mine else range(0)
        self._nsight = NsightWindow(self._steps) if watched_by_nsight() else None
        # The tracing library is slow at first: where there is a step before the window it gets used to its work there.
        self._settles = bool(self._steps) and self._steps[0] > steps[0]
        self._trace: profile | None = None

    def before(self, step: int) -> None:
        """Begin the trace where the window begins."""
        if self._nsight is not None:
            self._nsight.before(step)
        elif self._steps and step == self._steps[0] - self._settles:
            activities = [ProfilerActivity.CPU]
            if self._mesh.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            settle = schedule(wait=0, warmup=1, active=len(self._steps), repeat=1) if self._settles else None
            self._trace = profile(activities=activities, schedule=settle)
            self._trace.start()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Marks a part of a step in the trace."""
        marked = self._trace is not None or (self._nsight is not None and self._nsight.is_open)
        return self._mark(name) if marked else nullcontext()

    @contextmanager
    def _mark(self, name: str) -> Iterator[None]:
        on_gpu = self._mesh.device.type == "cuda"
        with record_function(name):
            if on_gpu:
                torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                if on_gpu:
                    torch.cuda.nvtx.range_pop()

    def after(self, step: int) -> tuple[TimeSpent, ...]:
        """Once the window's last step is done: write the files; on rank 0 where the time went."""
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
            found = analyse(json.load(file)["traceEvents"], self._mesh.device.type)
        write_whole(self._folder / "time.json", to_json({"steps": list(self._steps), **found}, indent=1))
        return tuple(TimeSpent(**row) for row in found["time_spent"])


def analyse(events: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Seconds a step of each kind, and the names that took longest, from the events of a Chrome trace."""
    timed = [event for event in events if event.get("ph") == "X"]
    marks = [e for e in timed if e.get("cat") == "user_annotation" and re.fullmatch(r"step \d+", e["name"])]
    spans = sorted((mark["ts"], mark["ts"] + mark["dur"]) for mark in marks)
    if device == "cuda":
        kernels = [_work(e, MEMORY) for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        pieces = by_precedence(kernels, KINDS)
    else:
        here = [e for e in timed if e["tid"] == marks[0]["tid"]]
        calls = [_work(e, MEMORY) for e in here if e.get("cat") == "cpu_op"]
        pieces = by_nesting(calls + [_work(e, IDLE) for e in here if e.get("cat") == "user_annotation"])
    wall = sum(end - start for start, end in spans)
    spent = dict.fromkeys(KINDS, 0.0)
    names: dict[tuple[str, str], float] = {}
    for piece in within(pieces, spans):
        if piece.kind != IDLE:
            taken = piece.end - piece.start
            spent[piece.kind] += taken
            names[piece.kind, piece.name] = names.get((piece.kind, piece.name), 0.0) + taken
    spent[IDLE] = max(0.0, wall - sum(spent.values()))
    per_step = 1e-6 / len(spans)  # a trace counts in microseconds
    longest = sorted(names.items(), key=lambda item: -item[1])[:LONGEST]
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


def _work(event: dict[str, Any], otherwise: str) -> Work:
    kind = kind_of(event["name"])
    return Work(event["ts"], event["ts"] + event["dur"], kind or otherwise, event["name"], decided=kind is not None)
