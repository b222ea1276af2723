"""Step time of this rank, and how much of it was not spent waiting for others: a slow rank makes all others wait.

With gloo the host waits in `Work.wait` for the collectives of FSDP, pipelining and torch.distributed, and in
`wait_tensor` for functional ones; both are timed, at a microsecond per call. With NCCL the device waits inside
kernels that only a trace can tell apart, so the busy time is unknown.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


class StepTimer:
    """Timer of one step after another; created once per process, after the process group."""

    def __init__(self, device: torch.device, world_size: int):
        self._times_waiting = device.type == "cpu" and world_size > 1
        self._waited = self._waited_at_start = self._started = 0.0
        if self._times_waiting:
            dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
            functional.wait_tensor = self._timed(functional.wait_tensor)

    def start(self) -> None:
        """Start timing a step."""
        self._started, self._waited_at_start = time.perf_counter(), self._waited

    def stop(self) -> tuple[float, float | None]:
        """Return the seconds of the step, and those not spent waiting for other ranks; None where unknown."""
        seconds = time.perf_counter() - self._started
        return seconds, seconds - (self._waited - self._waited_at_start) if self._times_waiting else None

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self._waited += time.perf_counter() - start

        return call
