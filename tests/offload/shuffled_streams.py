"""Streams that execute their entries as late and in as odd an order as the declared waits allow.

Threads of a disk tier wait for events too, and run entries meanwhile: one thread at a time.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from threading import RLock

from llmb.offload.cuda_streams import HostEvent
from llmb.perfmodel.offload.stream_timeline import STREAMS, StreamName


class ShuffledEvent(HostEvent):
    """Done when so many entries of a stream are."""

    def __init__(self, streams: "ShuffledStreams", stream: StreamName):
        super().__init__()
        self.streams, self.stream, self.entries = streams, stream, streams.issued[stream]

    def is_done(self) -> bool:
        return self.streams.done[self.stream] >= self.entries

    def wait(self) -> None:
        with self.streams.lock:
            while not self.is_done():
                self.streams.run_one()


class ShuffledStreams:
    """Streams that respect only their own order and the waits."""

    def __init__(self, seed: int):
        self.random, self.lock = random.Random(seed), RLock()
        self.queues: dict[StreamName, deque] = {stream: deque() for stream in STREAMS}
        self.issued = dict.fromkeys(STREAMS, 0)
        self.done = dict.fromkeys(STREAMS, 0)
        self.base = dict.fromkeys(STREAMS, 0)
        self.eager = "compute"  # stream that gets ahead for a while
        self.left = 0

    def begin(self) -> None:
        self.base = dict(self.issued)

    def enter(self, stream: StreamName, action: Callable[[], None], waits: Mapping[StreamName, int]) -> None:
        base, entries = self.base, waits.items()
        with self.lock:
            self.queues[stream].append((action, {awaited: base[awaited] + entry for awaited, entry in entries}))
            self.issued[stream] += 1
            while sum(map(len, self.queues.values())) > 60:
                self.run_one()

    def record_event(self, stream: StreamName) -> ShuffledEvent:
        return ShuffledEvent(self, stream)

    def wait(self) -> None:
        with self.lock:
            while any(self.queues.values()):
                self.run_one()

    def run_one(self) -> None:
        """Run one entry that is ready; of the same stream for a while, so that it gets as far as it can."""
        ready = [stream for stream in STREAMS if self.queues[stream] and self._may_run(stream)]
        assert ready, "all streams wait"
        if self.eager not in ready or self.left == 0:
            self.eager, self.left = self.random.choice(ready), self.random.randrange(1, 30)
        self.left -= 1
        action, _ = self.queues[self.eager].popleft()
        action()
        self.done[self.eager] += 1

    def _may_run(self, stream: StreamName) -> bool:
        return all(self.done[awaited] > entry for awaited, entry in self.queues[stream][0][1].items())
