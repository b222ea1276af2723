"""Which of several kernels that do the same is fastest on a GPU that is short of power.

    times = in_turn(ways)               # milliseconds of each, one behind the other
    number = fastest(ways, kernels)     # `kernels` name what each way runs; a way says whether it could

Such a chip lowers its clock until the power suffices, within some 50 ms. Ways that take turns all run at one clock:
their times say how many cycles each needs, and nothing of its power. On an H200 a kernel of large tiles that needs 5 %
more of them than one of small tiles was 2 % faster by itself, as the chip sustained a higher clock under it; and over a
step power is what there is a fixed amount of. Hence a kernel also has the device to itself for a while. How much longer
it takes then than in turns is its thirst, which depends on the kernel far more than on the sizes, so the first times
that it is met are enough. Their median counts, because a clock that falls sometimes falls too far.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch

Way = Callable[[], object]
TRIED_S, RESTED_S = 0.1, 1.0  # in turns; more the first time: a chip that has rested runs faster than it sustains
HOPELESS = 1.08  # times as long as the fastest, more than thirst makes up for: tried no more
ALONE_S, SETTLING = 0.2, 0.4  # of a kernel by itself, and the share of it in which the clock gets used to it
MEETINGS = 3  # in which a kernel's thirst is measured

_loaded: set[Hashable] = set()
_thirst: defaultdict[Hashable, list[float]] = defaultdict(list)


def in_turn(ways: Sequence[Way]) -> list[float]:
    """Milliseconds of each by the device's own clock, once; the host waits for the device only at the end."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(ways) + 1)]
    ways[0]()  # meanwhile the host gets ahead of the device
    marks[0].record()
    for way, mark in zip(ways, marks[1:], strict=True):
        way()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def alone(way: Way, expected: float) -> float:
    """Milliseconds of one way that follows itself for a while; about how many are expected."""
    count = max(2, round(1000 * ALONE_S / expected))
    settling = round(count * SETTLING)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(count):
        if number == settling:
            start.record()
        way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (count - settling)


def fastest(ways: Sequence[Callable[[], bool]], kernels: Sequence[Hashable]) -> int:
    """The number of the one that would be fastest by itself, of those that can."""
    for way, kernel in zip(ways, kernels, strict=True):
        if kernel not in _loaded:  # its first launch takes longer
            way()
            _loaded.add(kernel)
    turns = _turns(ways)
    if len(turns) == 1:
        return next(iter(turns))
    for number, spent in turns.items():
        if len(_thirst[kernels[number]]) < MEETINGS:
            _thirst[kernels[number]].append(alone(ways[number], spent) / spent)
    return min(turns, key=lambda number: turns[number] * median(_thirst[kernels[number]]))


def _turns(ways: Sequence[Callable[[], bool]]) -> dict[int, float]:
    """Milliseconds of each that can and is not hopeless, by its number."""
    times: dict[int, list[float]] = {number: [] for number in range(len(ways))}
    able, could = list(times), dict.fromkeys(times, False)

    def go(number: int) -> None:
        could[number] = ways[number]()

    until = time.perf_counter() + (TRIED_S if _thirst else RESTED_S)
    while not any(could.values()) or (len(able) > 1 and time.perf_counter() < until):
        found = dict(zip(able, in_turn([partial(go, number) for number in able]), strict=True))
        able = [number for number in able if could[number]]
        if not able:
            raise RuntimeError(f"none of {len(ways)} kernels takes what it is given")
        for number in able:
            times[number].append(found[number])
        least = min(found[number] for number in able)
        able = [number for number in able if found[number] <= HOPELESS * least]
    return {number: median(times[number][len(times[number]) // 2 :]) for number in able}
