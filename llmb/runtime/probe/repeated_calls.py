"""Time many calls of one action when the device has settled: a power-limited chip slows down within seconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmb.perfmodel.probe.probe_record import Spread, spread

SETTLING = 1 / 3  # fraction of each measurement that is discarded


@dataclass(frozen=True)
class Measurement:
    """An amount (FLOPs, bytes, calls) done by every call, and the seconds of each."""

    amount: float
    seconds: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def rate(self) -> float:
        """Amount per second over all calls: what a long run sees."""
        return self.amount / self.mean_s

    def rates(self, unit: float) -> Spread | None:
        """Return the spread of the rates of single calls; `unit`: 1e9 for G."""
        return spread(self.amount / seconds / unit for seconds in self.seconds if seconds > 0)

    def times(self, unit: float) -> Spread | None:
        """Return the spread of the time for one unit of the amount; `unit`: 1e-6 for us."""
        return spread(seconds / self.amount / unit for seconds in self.seconds)


def repeat_calls(action: Callable[[], object], device: torch.device, duration: float, amount: float) -> Measurement:
    """Call an action for `duration` seconds; the device finishes each call before the next."""
    for _ in range(2):  # kernels are chosen and compiled
        action()
    finish(device)
    began = now = time.perf_counter()
    settled = False
    seconds: list[float] = []
    while now - began < duration or not seconds:
        start = now
        action()
        finish(device)
        now = time.perf_counter()
        if settled:
            seconds.append(now - start)
        settled = settled or now - began >= SETTLING * duration
    return Measurement(amount, tuple(seconds))


def finish(device: torch.device) -> None:
    """Wait until a GPU has done everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
