"""Three streams that work concurrently: computation, copies to the device (H2D), copies to the host (D2H).

    streams = create_streams(device)
    streams.begin()                                         # the entries of a program are counted from here
    streams.enter("inbound", copy, {"compute": 4})          # once entry 4 of the compute stream is done
    streams.wait()                                          # for everything

A stream executes its entries in order. On a GPU each is a CUDA stream and the GPU does the waiting: Python issues and
goes on. On a CPU every entry is executed at once: whatever it waits for was issued before it.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from llmb.perfmodel.offload.stream_timeline import DEVICE_STREAMS, StreamName

EVENTS = 4096  # per stream; waiting for an older entry means waiting for the oldest of these


class StreamEvent(Protocol):
    """Point of a stream that can be queried, and measured from."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def elapsed_s(self, later: "StreamEvent") -> float: ...


class Streams(Protocol):
    """Streams that execute a program."""

    def begin(self) -> None:
        """Count entries from 0 again; those of the previous program have negative numbers."""

    def enter(self, stream: StreamName, action: Callable[[], None], waits: Mapping[StreamName, int]) -> None:
        """Issue an action to a stream, to run once the given entries of other streams are done."""

    def record_event(self, stream: StreamName) -> StreamEvent:
        """Return an event that is done when all that was issued to the stream so far is done."""

    def wait(self) -> None:
        """Wait for all streams."""


def create_streams(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()


class HostEvent:
    """Event of a stream that executes everything at once."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def elapsed_s(self, later: StreamEvent) -> float:
        assert isinstance(later, HostEvent)
        return later.time - self.time


class SerialStreams:
    """All streams on one thread."""

    def begin(self) -> None:
        pass

    def enter(self, stream: StreamName, action: Callable[[], None], waits: Mapping[StreamName, int]) -> None:
        action()

    def record_event(self, stream: StreamName) -> StreamEvent:
        return HostEvent()

    def wait(self) -> None:
        pass


class CudaEvent:
    """Timing event of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def elapsed_s(self, later: StreamEvent) -> float:
        assert isinstance(later, CudaEvent)
        return self.event.elapsed_time(later.event) / 1e3


class CudaStreams:
    """One CUDA stream each; computation uses the current one, whose allocator its temporaries come from."""

    def __init__(self, device: torch.device):
        self.cuda_streams: dict[StreamName, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "inbound": torch.cuda.Stream(device),
            "outbound": torch.cuda.Stream(device),
        }
        self.events = {stream: [torch.cuda.Event() for _ in range(EVENTS)] for stream in DEVICE_STREAMS}
        self.issued = dict.fromkeys(DEVICE_STREAMS, 0)  # entries in total
        self.base = dict.fromkeys(DEVICE_STREAMS, 0)  # of these, before the current program
        self.waited = {  # entries of others that each has waited for
            stream: dict.fromkeys(DEVICE_STREAMS, 0) for stream in DEVICE_STREAMS
        }

    def begin(self) -> None:
        self.base = dict(self.issued)

    def enter(self, stream: StreamName, action: Callable[[], None], waits: Mapping[StreamName, int]) -> None:
        cuda_stream = self.cuda_streams[stream]
        for awaited, entry in waits.items():
            self._wait_for(stream, awaited, self.base[awaited] + entry)
        with self._on(stream):
            action()
        self.events[stream][self.issued[stream] % EVENTS].record(cuda_stream)
        self.issued[stream] += 1

    def record_event(self, stream: StreamName) -> StreamEvent:
        return CudaEvent(self.cuda_streams[stream])

    def wait(self) -> None:
        for cuda_stream in self.cuda_streams.values():
            cuda_stream.synchronize()

    def _on(self, stream: StreamName) -> AbstractContextManager[object]:
        return nullcontext() if stream == "compute" else torch.cuda.stream(self.cuda_streams[stream])

    def _wait_for(self, stream: StreamName, awaited: StreamName, entry: int) -> None:
        if entry < self.waited[stream][awaited]:
            return
        entry = max(entry, self.issued[awaited] - EVENTS)  # later than necessary, but issued: it will be done, too
        self.cuda_streams[stream].wait_event(self.events[awaited][entry % EVENTS])
        self.waited[stream][awaited] = entry + 1
