"""Broadcast of the HTTP process's commands to all ranks of an engine.

Ranks that compute the same requests each run the same deterministic scheduler, so they must get the same commands
between the same two steps. Rank 0 receives them from the HTTP process and broadcasts them before every step, over gloo,
as they are on the host. A rank without work waits in that broadcast; rank 0 wakes it at least every few seconds, since
a collective that waits for too long counts as a failure.
"""

import pickle

import torch
import torch.distributed as dist

from llmb.serve.engine import Engine
from llmb.serve.http.engine_messages import ChannelClosed, Command, EngineChannel

HEARTBEAT_S = 5.0
CLOSED = -1  # instead of the number of bytes


class CommandSource:
    """Commands of an engine with a single rank, straight from the HTTP process."""

    idle_timeout_s: float | None = None  # None: an idle engine waits until a command comes

    def __init__(self, channel: EngineChannel):
        self._channel = channel

    def receive(self, engine: Engine, idle: bool) -> list[Command]:
        """Return the commands for the next step: an idle engine waits for one, a busy one as long as it can afford.

        Raise ChannelClosed at the end.
        """
        commands: list[Command] = self._channel.receive(self.idle_timeout_s if idle else 0)
        while slack_s := engine.slack_s:
            commands += self._channel.receive(slack_s)
        return commands


class CommandBroadcast(CommandSource):
    """The same commands on every rank; a collective call."""

    idle_timeout_s = HEARTBEAT_S

    def __init__(self, channel: EngineChannel, rank: int, group: dist.ProcessGroup):
        super().__init__(channel)
        self._rank, self._group = rank, group

    def receive(self, engine: Engine, idle: bool) -> list[Command]:
        if self._rank > 0:
            return self._receive_broadcast()
        try:
            commands = super().receive(engine, idle)
        except ChannelClosed:
            self._broadcast(torch.tensor([CLOSED]))
            raise
        data = pickle.dumps(commands) if commands else b""
        self._broadcast(torch.tensor([len(data)]))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return commands

    def _receive_broadcast(self) -> list[Command]:
        length = int(self._broadcast(torch.empty(1, dtype=torch.int64)).item())
        if length == CLOSED:
            raise ChannelClosed
        if not length:
            return []
        commands: list[Command] = pickle.loads(
            self._broadcast(torch.empty(length, dtype=torch.uint8)).numpy().tobytes()
        )
        return commands

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor


def any_rank_busy(group: dist.ProcessGroup, busy: bool) -> bool:
    """Return whether any rank has work; the engine's `lockstep` where ranks have their own requests."""
    busy_rank = torch.tensor([int(busy)])
    dist.all_reduce(busy_rank, dist.ReduceOp.MAX, group=group)
    return bool(busy_rank.item())
