"""Three lanes that work beside one another: computation, copies to the device, copies home.

    lanes = lanes_on(device)
    lanes.begin()                                           # a program's entries are counted from here
    lanes.enter("inbound", copy, {"compute": 4})            # when entry 4 of the other lane is done
    lanes.wait()                                            # for everything

A lane does its entries in order. On a GPU each is a stream, and waiting is left to the GPU: Python issues and goes on.
On a CPU every entry is done at once: whatever it waits for was issued before it.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from llmb.perfmodel.offload.stream_timeline import LANES, Lane

EVENTS = 4096  # of each lane; who waits for an entry longer ago waits for the oldest of these


class Moment(Protocol):
    """A point of a lane that can be asked for, and measured from."""

    def is_past(self) -> bool: ...
    def wait(self) -> None: ...
    def seconds_until(self, other: "Moment") -> float: ...


class Lanes(Protocol):
    """What follows a program."""

    def begin(self) -> None:
        """From now on entries are counted from 0 again; those of the program before have negative numbers."""

    def enter(self, lane: Lane, work: Callable[[], None], waits: Mapping[Lane, int]) -> None:
        """Do this next on a lane, when the named entries of other lanes are done."""

    def moment(self, lane: Lane) -> Moment:
        """When all that was issued to a lane so far is done."""

    def wait(self) -> None:
        """Until all lanes are done."""


def lanes_on(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else LanesInTurn()


class HostMoment:
    """Of a lane that does everything at once."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def is_past(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_until(self, other: Moment) -> float:
        assert isinstance(other, HostMoment)
        return other.time - self.time


class LanesInTurn:
    """All lanes on one thread."""

    def begin(self) -> None:
        pass

    def enter(self, lane: Lane, work: Callable[[], None], waits: Mapping[Lane, int]) -> None:
        work()

    def moment(self, lane: Lane) -> Moment:
        return HostMoment()

    def wait(self) -> None:
        pass


class CudaMoment:
    """An event of a stream."""

    def __init__(self, stream: torch.cuda.Stream):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def is_past(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_until(self, other: Moment) -> float:
        assert isinstance(other, CudaMoment)
        return self.event.elapsed_time(other.event) / 1e3


class CudaLanes:
    """A stream each; the computation has the current one, whose allocator its temporaries come from."""

    def __init__(self, device: torch.device):
        self.streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "inbound": torch.cuda.Stream(device),
            "outbound": torch.cuda.Stream(device),
        }
        self.events = {lane: [torch.cuda.Event() for _ in range(EVENTS)] for lane in LANES}
        self.issued = dict.fromkeys(LANES, 0)  # entries in all
        self.base = dict.fromkeys(LANES, 0)  # of these, before the current program
        self.seen = {lane: dict.fromkeys(LANES, 0) for lane in LANES}  # how many of each other a lane has waited for

    def begin(self) -> None:
        self.base = dict(self.issued)

    def enter(self, lane: Lane, work: Callable[[], None], waits: Mapping[Lane, int]) -> None:
        stream = self.streams[lane]
        for other, entry in waits.items():
            self._wait_for(lane, other, self.base[other] + entry)
        with self._on(lane):
            work()
        self.events[lane][self.issued[lane] % EVENTS].record(stream)
        self.issued[lane] += 1

    def moment(self, lane: Lane) -> Moment:
        return CudaMoment(self.streams[lane])

    def wait(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def _on(self, lane: Lane) -> AbstractContextManager[object]:
        return nullcontext() if lane == "compute" else torch.cuda.stream(self.streams[lane])

    def _wait_for(self, lane: Lane, other: Lane, entry: int) -> None:
        if entry < self.seen[lane][other]:
            return
        entry = max(entry, self.issued[other] - EVENTS)  # later than asked for, but issued: it comes, too
        self.streams[lane].wait_event(self.events[other][entry % EVENTS])
        self.seen[lane][other] = entry + 1
