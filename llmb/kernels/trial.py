"""Which of several ways to do the same is fastest on a GPU, at the clock that it sustains.

    times = in_turn(ways)               # milliseconds of each, one behind the other
    number = fastest(ways)

A chip that is short of power slows down: the speed of each way depends on how much the ones before it took, so they
take turns, and those before it has slowed down do not count.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

Way = Callable[[], object]
TRIED_S, FEWEST_ROUNDS = 0.1, 2
HOPELESS = 1.15  # times as long as the fastest: tried no more


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


def fastest(ways: Sequence[Way]) -> int:
    """The number of the one with the smallest median."""
    able = list(range(len(ways)))
    times: list[list[float]] = [[] for _ in ways]
    began = time.perf_counter()
    while len(able) > 1 and (len(times[able[0]]) < FEWEST_ROUNDS or time.perf_counter() - began < TRIED_S):
        found = in_turn([ways[number] for number in able])
        for number, spent in zip(able, found, strict=True):
            times[number].append(spent)
        able = [number for number, spent in zip(able, found, strict=True) if spent <= HOPELESS * min(found)]
    return min(able, key=lambda number: median(times[number][len(times[number]) // 2 :] or [0.0]))
