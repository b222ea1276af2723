"""Breakdown of a serving step: kernels of some profiled steps by class, idle time, and host time.

Kernels may overlap (a small one starts while the one before ends), so the moments are dealt out: where several run the
class named first owns the moment. What no name fits is "other", and its longest kernels are listed, so that nothing
hides. On a CPU the times are the own times of torch's operations.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from inference.infer_ceilings import DECODE, EXPERTS, PREFILL, PRODUCTS, SAMPLING, SMALL, Step
from inference.infer_serving import Row, submit
from llmb.config.model import Model
from llmb.serve.engine import Engine
from llmb.serve.step_batch import StepBatch
from llmb.train.kernel_intervals import KernelInterval, resolve_overlaps

COPIES, OTHER = "copies", "other"
# By the names of kernels, ours and others'; the first line that fits decides.
NAMES = (
    (COPIES, r"^memcpy|^memset|^aten::(copy_|_to_copy|fill_|zero_)$"),
    (DECODE, r"^_(paged_decode|combine_splits|decode_attention|mla_attention|mla_combine_splits)\b"),
    (PREFILL, r"^_(paged|mla)_prefill\b|flash|fmha|sdpa|scaled_dot_product|cudnn.*attention"),
    (EXPERTS, r"^_moe_\w+_kernel\b"),
    (
        SMALL,
        r"^_((gated_)?activation(_backward)?|quantize_rows|(mla_)?rope_and_cache|route_kernel)\b|rms_?norm|cos_kernel|sin_kernel",
    ),
    (SAMPLING, r"arg_?max|sort|softmax|cumsum|scan"),
    (
        PRODUCTS,
        r"^_block_scaled_mm\b|gemm|gemv|nvjet|cutlass|cublas|xmma|matmul|split_?k|^aten::(mm|addmm|bmm|linear|mv)$",
    ),
)
CLASSES = (PRODUCTS, EXPERTS, DECODE, PREFILL, SMALL, SAMPLING, COPIES, OTHER)
LONGEST = 6  # kernels of no class that are listed


def kind_of(name: str) -> str:
    """Return the class of a kernel or operation."""
    return next((kind for kind, pattern in NAMES if re.search(pattern, name, re.IGNORECASE)), OTHER)


@dataclass(frozen=True)
class Profiled:
    """Times of an average step in seconds."""

    step: Step  # what it computed
    wall: float  # of the same steps without a profiler
    span: float  # from the first kernel's start to the last one's end, with it
    kinds: dict[str, float]
    unclassified: list[tuple[str, float]]
    host: dict[str, float]  # without a profiler: scheduling, launching, processing outputs, waiting for the device

    @property
    def idle(self) -> float:
        """In which no kernel ran."""
        return max(0.0, self.span - sum(self.kinds.values()))


def fill_to_steady_state(engine: Engine, model: Model, row: Row, more: int = 256) -> None:
    """Bring the engine to the steady state of a long run: requests at every stage of their outputs, more waiting.

    Plans are taken as computed without computing them: blocks and positions are those of a long run, and what the
    cache holds does not change how long reading it takes.
    """
    scheduler, limits = engine.scheduler, engine.scheduler.limits
    stages = [index * row.osl // row.batch for index in range(row.batch)]
    submit(engine, model, [(row.isl + stage, row.osl - stage) for stage in reversed(stages)])
    scheduler.limits = replace(limits, max_num_tokens=row.batch * (row.isl + row.osl))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, [0] * len(plan.sampling_chunks))
    scheduler.limits = limits
    submit(engine, model, [(row.isl, row.osl)] * more, first=row.batch)


def profiled(engine: Engine, steps: int, device: torch.device) -> Profiled:
    """Run twice as many steps, the second half under the profiler."""
    _settle(engine, device)
    began = time.perf_counter()
    with _watched(engine) as (host, _):
        for _ in range(steps):
            engine.step()
        _synchronize(device)
    wall = time.perf_counter() - began
    host["waiting for the device"] = wall - sum(host.values())
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with _watched(engine) as (_, plans), profile(activities=[activity]) as trace:
        for _ in range(steps):
            engine.step()
        _synchronize(device)
    intervals = list(resolve_overlaps(_work(trace, device), CLASSES))
    kinds, unclassified = Counter[str](), Counter[str]()
    for interval in intervals:
        kinds[interval.kind] += (interval.end - interval.start) / steps
        if interval.kind == OTHER:
            unclassified[interval.name] += (interval.end - interval.start) / steps
    span = (max(interval.end for interval in intervals) - min(interval.start for interval in intervals)) / steps
    each = {name: seconds / steps for name, seconds in host.items()}
    return Profiled(_mean_step(plans), wall / steps, span, dict(kinds), unclassified.most_common(LONGEST), each)


def _settle(engine: Engine, device: torch.device) -> None:
    """Run what happens only once: the first steps, and the start of the profiler."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for _ in range(5):
        engine.step()
    with profile(activities=[activity]):
        engine.step()
        _synchronize(device)
    engine.step()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _watched(engine: Engine) -> Iterator[tuple[dict[str, float], list[StepBatch]]]:
    """Record host seconds in the three calls of an engine step, and the launched batches."""
    host, plans = {"scheduling": 0.0, "launching": 0.0, "processing outputs": 0.0}, []

    def timed_call(call: Any, name: str) -> Any:
        def replacement(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            host[name] += time.perf_counter() - began
            if name == "scheduling":
                plans.append(result)
            return result

        return replacement

    calls = ((engine.scheduler, "schedule"), (engine.runner, "launch"), (engine.scheduler, "update_from_output"))
    for (owner, method), name in zip(calls, list(host), strict=True):
        setattr(owner, method, timed_call(getattr(owner, method), name))
    try:
        yield host, plans
    finally:
        for owner, method in calls:
            delattr(owner, method)


def _work(trace: Any, device: torch.device) -> Iterator[KernelInterval]:
    """Yield kernels in seconds; on a CPU operations with their self time, as they nest."""
    for event in trace.events():
        start, end = event.time_range.start, event.time_range.end
        if device.type != "cuda":
            end = start + event.self_cpu_time_total
        elif event.device_type != DeviceType.CUDA:
            continue
        yield KernelInterval(start / 1e6, end / 1e6, kind_of(event.name), event.name)


def _mean_step(plans: list[StepBatch]) -> Step:
    """Return the average work of these batches."""
    decodes = contexts = prompt_tokens = pairs = samples = 0.0
    for plan in plans:
        first = plan.num_decodes
        decodes += first
        contexts += sum(part.end for part in plan.chunks[:first])
        prompt_tokens += sum(part.num_tokens for part in plan.chunks[first:])
        pairs += sum(part.num_tokens * part.start + part.num_tokens**2 / 2 for part in plan.chunks[first:])
        samples += len(plan.sampling_chunks)
    steps = len(plans)
    return Step(
        decodes=decodes / steps,
        context=contexts / max(decodes, 1.0),
        prompt_tokens=prompt_tokens / steps,
        prompt_pairs=pairs / steps,
        samples=samples / steps,
    )
