"""In what order a pipeline's rank computes: 1F1B, and interleaved where a rank has several parts of the network.

    rank_order(pp=8, vp=None, ga=64, rank=0)      -> Pass(part=0, micro=0, forward=True), ...
    bubble(pp=8, vp=8, ga=64)                     -> 0.0125 of the time a rank waits

These are the orders of `torch.distributed.pipelining`: Schedule1F1B and ScheduleInterleaved1F1B. A rank first goes
forward with as many micro-batches as it takes until the first gradient arrives, then one forward and one backward in
turn, then backward only. Interleaved, micro-batches come in rounds, each of which passes one part after the other.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

BACKWARD_COST = 2.0  # of a forward pass
SENDS_UNDER_WAY = 4  # of a rank that computes meanwhile, at most: two in each direction


class Pass(NamedTuple):
    """One part of the network, one micro-batch, one direction."""

    part: int  # of this rank's, from the first; stage part * pp + rank of the pipeline
    micro: int
    forward: bool


def rank_order(pp: int, vp: int | None, ga: int, rank: int) -> list[Pass]:
    """All passes of a rank in a step; without a pipeline each micro-batch forward and at once backward."""
    parts = vp or 1
    round_size = ga // max(1, ga // pp) if parts > 1 else 1
    away = pp - 1 - rank  # from the last rank, which turns round first
    ahead = min(ga * parts, (parts - 1) * round_size + 2 * away if parts > 1 else away)
    return list(_alternating(ga, parts, round_size, ahead))


def _alternating(ga: int, parts: int, round_size: int, ahead: int) -> Iterator[Pass]:
    """So many passes forward ahead of the first backward, then in turn."""
    seen: Counter[tuple[int, bool]] = Counter()

    def taken(part: int, forward: bool) -> Pass:
        seen[part, forward] += 1
        return Pass(part, seen[part, forward] - 1, forward)

    for number in range(ga * parts + ahead):
        if number < ga * parts:
            yield taken(number // round_size % parts, True)
        if number >= ahead:
            yield taken(parts - 1 - (number - ahead) // round_size % parts, False)


def most_in_flight(pp: int, vp: int | None, ga: int, rank: int) -> int:
    """Parts' passes whose activations a rank holds at once, at most."""
    held = most = 0
    for one in rank_order(pp, vp, ga, rank):
        held += 1 if one.forward else -1
        most = max(most, held)
    return most


def bubble(pp: int, vp: int | None, ga: int) -> float:
    """The share of a step that a rank waits for others, if all parts take equally long and sending takes no time.

    Found by playing the schedule through; the known formula (pp - 1) / (vp * ga + pp - 1) is the same where rounds
    are whole: with 16 micro-batches 8 ranks are idle for 7 / (16 + 7) = 30 % of the time; with 8 stages each, for
    7 / (8 * 16 + 7) = 5 %.
    """
    orders = [rank_order(pp, vp, ga, rank) for rank in range(pp)]
    stages = pp * (vp or 1)
    ended: dict[tuple[int, int, bool], float] = {}
    clocks, places = [0.0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                part, micro, forward = order[places[rank]]
                stage = part * pp + rank
                before = _before(stage, stages, micro, forward)
                if before is not None and before not in ended:
                    break
                start = max(clocks[rank], ended[before] if before is not None else 0.0)
                clocks[rank] = ended[stage, micro, forward] = start + (1.0 if forward else BACKWARD_COST)
                places[rank] += 1
                moved = True
    busy = ga * (vp or 1) * (1.0 + BACKWARD_COST)
    return 1 - busy / max(clocks)


def _before(stage: int, stages: int, micro: int, forward: bool) -> tuple[int, int, bool] | None:
    """The pass whose result this one needs."""
    if forward:
        return (stage - 1, micro, True) if stage else None
    return (stage + 1, micro, False) if stage < stages - 1 else (stage, micro, True)
