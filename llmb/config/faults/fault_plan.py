"""Plan of the faults that a run injects on purpose: which kind, at which step, on which rank.

A plan is part of config.json; `llmb/runtime/faults/fault_injector.py` follows it in every rank.
"""

from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal["rank_killed", "node_lost", "hang", "slow_rank", "checkpoint_interrupted", "disk_full"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
CHECKPOINT_KINDS = ("checkpoint_interrupted", "disk_full")  # strike while the checkpoint of their step is written


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: it strikes as its step begins, or while the checkpoint after its step is written."""

    kind: FaultKind
    step: int  # from 1
    rank: int = 0  # of node_lost: any rank of the node
    node_ranks: int | None = None  # node_lost: ranks of a node, which may be emulated; none: GPUs per node
    slow_s: float = 1.0  # slow_rank: time that it adds to each step
    slow_steps: int = 5  # slow_rank: steps that are slow

    @property
    def ends_run(self) -> bool:
        """True if the run has to restart."""
        return self.kind != "slow_rank"


@dataclass(frozen=True, kw_only=True)
class FaultInjection:
    """All faults of a run, by step, and where they come from."""

    faults: tuple[Fault, ...]
    source: str  # a file, or a rate with the seed of its draw
    seconds_between: float | None = None  # mean time between faults, of a rate per day; none: known after the run
    injected: tuple[int, ...] = ()  # indices of those that earlier starts of the run have injected

    def pending(self) -> list[tuple[int, Fault]]:
        """Return the faults that are still to come, with their indices."""
        return [(index, fault) for index, fault in enumerate(self.faults) if index not in self.injected]
