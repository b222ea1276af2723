"""How long a step took this rank, and how much of that it did not wait for others: who is slow makes all others wait.

Over gloo the host waits in `Work.wait` for every collective and message of torch's own parts (FSDP, pipelining,
torch.distributed) and in `wait_tensor` for those of DTensor; both are timed, for a microsecond a call. Over NCCL it is
the device that waits, inside kernels which only a trace tells from others: how busy it was is not known.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


class StepClock:
    """Times one step after the other; made once a process, when the process group is there."""

    def __init__(self, device: torch.device, world_size: int):
        self._tells_waiting = device.type == "cpu" and world_size > 1
        self._waited = self._waited_before = self._began = 0.0
        if self._tells_waiting:
            dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
            functional.wait_tensor = self._timed(functional.wait_tensor)

    def begin(self) -> None:
        """A step begins."""
        self._began, self._waited_before = time.perf_counter(), self._waited

    def end(self) -> tuple[float, float | None]:
        """Its seconds, and those of them that this rank did not wait for others; null where that is not known."""
        seconds = time.perf_counter() - self._began
        return seconds, seconds - (self._waited - self._waited_before) if self._tells_waiting else None

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(*arguments, **options)
            finally:
                self._waited += time.perf_counter() - began

        return call
