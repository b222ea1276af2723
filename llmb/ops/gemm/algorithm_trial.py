"""Selection of the fastest of several equivalent kernels on a power-limited GPU.

    times = time_interleaved(candidates)            # milliseconds of each, run one after the other
    index = pick_fastest(candidates, kernels)       # `kernels` identify what each runs; a candidate returns success

A power-limited chip lowers its clock until the power suffices, within some 50 ms. Interleaved candidates all run at one
clock: their times measure cycles, not power. On an H200 a kernel with large tiles that needs 5 % more cycles than one
with small tiles was 2 % faster by itself, because the chip sustained a higher clock under it; and over a training step
power is the fixed budget. Hence each kernel also has the device to itself for a while. The ratio of that time to its
interleaved time is its power-limited slowdown. It depends on the kernel far more than on the sizes, so it is measured
only the first few times a kernel occurs. The median counts, because a falling clock sometimes falls too far.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch

Candidate = Callable[[], object]
# Duration of interleaved runs; longer the first time, as an idle chip starts faster than it sustains.
INTERLEAVED_S, FIRST_INTERLEAVED_S = 0.1, 1.0
CUTOFF = 1.08  # candidates this many times slower than the fastest, more than power makes up for, are dropped
REPEATED_S, SETTLING_FRACTION = 0.2, 0.4  # of a kernel by itself, and the fraction in which the clock settles
SLOWDOWN_SAMPLES = 3  # measurements of a kernel's power-limited slowdown

_warmed_up: set[Hashable] = set()
_slowdowns: defaultdict[Hashable, list[float]] = defaultdict(list)


def time_interleaved(candidates: Sequence[Candidate]) -> list[float]:
    """Run each candidate once and return its milliseconds on the device; the host synchronizes only at the end."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(candidates) + 1)]
    candidates[0]()  # meanwhile the host gets ahead of the device
    events[0].record()
    for candidate, event in zip(candidates, events[1:], strict=True):
        candidate()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def time_repeated(candidate: Candidate, estimate_ms: float) -> float:
    """Run one candidate back to back for a while and return its mean milliseconds once the clock has settled."""
    count = max(2, round(1000 * REPEATED_S / estimate_ms))
    settling = round(count * SETTLING_FRACTION)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for iteration in range(count):
        if iteration == settling:
            start.record()
        candidate()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (count - settling)


def pick_fastest(candidates: Sequence[Callable[[], bool]], kernels: Sequence[Hashable]) -> int:
    """Return the index of the working candidate that would be fastest by itself."""
    for candidate, kernel in zip(candidates, kernels, strict=True):
        if kernel not in _warmed_up:  # its first launch takes longer
            candidate()
            _warmed_up.add(kernel)
    times = _interleaved_times(candidates)
    if len(times) == 1:
        return next(iter(times))
    for index, milliseconds in times.items():
        slowdowns = _slowdowns[kernels[index]]
        if len(slowdowns) < SLOWDOWN_SAMPLES:
            slowdowns.append(time_repeated(candidates[index], milliseconds) / milliseconds)
    return min(times, key=lambda index: times[index] * median(_slowdowns[kernels[index]]))


def _interleaved_times(candidates: Sequence[Callable[[], bool]]) -> dict[int, float]:
    """Median milliseconds by index of the candidates that work and stay within the cutoff."""
    samples: dict[int, list[float]] = {index: [] for index in range(len(candidates))}
    remaining, works = list(samples), dict.fromkeys(samples, False)

    def run(index: int) -> None:
        works[index] = candidates[index]()

    deadline = time.perf_counter() + (INTERLEAVED_S if _slowdowns else FIRST_INTERLEAVED_S)
    while not any(works.values()) or (len(remaining) > 1 and time.perf_counter() < deadline):
        times = dict(zip(remaining, time_interleaved([partial(run, index) for index in remaining]), strict=True))
        remaining = [index for index in remaining if works[index]]
        if not remaining:
            raise RuntimeError(f"none of {len(candidates)} kernels supports its operands")
        for index in remaining:
            samples[index].append(times[index])
        best = min(times[index] for index in remaining)
        remaining = [index for index in remaining if times[index] <= CUTOFF * best]
    return {index: median(samples[index][len(samples[index]) // 2 :]) for index in remaining}
