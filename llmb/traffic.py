"""What ranks send one another in a step: collectives by kind and group, with their number and bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All exchanges of one kind over one group in a step, as one rank sees them."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send, receive
    dimension: str  # whom it connects: tp, cp, pp, replicas (dp and cp together), ep, etp, edp, all
    ranks: int
    count: int
    bytes: int  # of the larger side on one rank: what an all-gather gives, what a reduce-scatter takes
