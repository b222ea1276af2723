"""Device time of one call, and of calls repeated for a while, as clocks fall under load."""

import time
from collections.abc import Callable

import torch


class DeviceTimer:
    """Seconds between `start` and `stop`: by CUDA events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        if self._events:
            torch.cuda.synchronize()
            self._events[0].record()

    def stop(self) -> float:
        if self._events is None:
            return time.perf_counter() - self._began
        self._events[1].record()
        torch.cuda.synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


def time_sustained(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of one call, when it is repeated for so long."""
    watch = DeviceTimer(device)
    call()
    watch.start()
    call()
    count = max(2, round(seconds / max(watch.stop(), 1e-6)))
    watch.start()
    for _ in range(count):
        call()
    return watch.stop() / count


def copy_bandwidth(device: torch.device, size: int, seconds: float) -> float:
    """Return the bytes/s of a device-to-device copy of random numbers; read and written bytes count."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_sustained(lambda: target.copy_(source), device, seconds)


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the replay of a CUDA graph of this call, so that the host does not bound small kernels."""
    if device.type != "cuda":
        return call
    call()  # compiles, and allocates workspaces
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
