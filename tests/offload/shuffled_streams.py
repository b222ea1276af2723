"""Lanes that get to their entries as late and in as odd an order as the declared waits allow: a missing one shows."""

import random
from collections import deque
from collections.abc import Callable, Mapping

from llmb.offload.cuda_streams import HostMoment
from llmb.perfmodel.offload.stream_timeline import LANES, Lane


class ShuffledMoment(HostMoment):
    """Past when so many entries of a lane are done."""

    def __init__(self, lanes: "ShuffledLanes", lane: Lane):
        super().__init__()
        self.lanes, self.lane, self.entries = lanes, lane, lanes.issued[lane]

    def is_past(self) -> bool:
        return self.lanes.done[self.lane] >= self.entries

    def wait(self) -> None:
        while not self.is_past():
            self.lanes.run_one()


class ShuffledLanes:
    """Only a lane's own order and the waits are kept."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.queues: dict[Lane, deque] = {lane: deque() for lane in LANES}
        self.issued = dict.fromkeys(LANES, 0)
        self.done = dict.fromkeys(LANES, 0)
        self.base = dict.fromkeys(LANES, 0)
        self.eager = "compute"  # which lane gets ahead for a while
        self.left = 0

    def begin(self) -> None:
        self.base = dict(self.issued)

    def enter(self, lane: Lane, work: Callable[[], None], waits: Mapping[Lane, int]) -> None:
        self.queues[lane].append((work, {other: self.base[other] + entry for other, entry in waits.items()}))
        self.issued[lane] += 1
        while sum(map(len, self.queues.values())) > 60:
            self.run_one()

    def moment(self, lane: Lane) -> ShuffledMoment:
        return ShuffledMoment(self, lane)

    def wait(self) -> None:
        while any(self.queues.values()):
            self.run_one()

    def run_one(self) -> None:
        """One entry that may go on; the same lane for a while, so that it gets as far as it can."""
        ready = [lane for lane in LANES if self.queues[lane] and self._may_run(lane)]
        assert ready, "all lanes wait"
        if self.eager not in ready or self.left == 0:
            self.eager, self.left = self.random.choice(ready), self.random.randrange(1, 30)
        self.left -= 1
        work, _ = self.queues[self.eager].popleft()
        work()
        self.done[self.eager] += 1

    def _may_run(self, lane: Lane) -> bool:
        return all(self.done[other] > entry for other, entry in self.queues[lane][0][1].items())
