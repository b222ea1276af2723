"""Order of a pipeline rank's passes: 1F1B, and interleaved 1F1B where a rank has several stages.

    rank_order(pp=8, vp=None, ga=64, rank=0)      -> Pass(stage=0, micro=0, forward=True), ...
    bubble(pp=8, vp=8, ga=64)                     -> 0.0125: the fraction of time that a rank waits

These are the orders of `torch.distributed.pipelining`: Schedule1F1B and ScheduleInterleaved1F1B. A rank first runs
forward passes (warm-up) until the first gradient arrives, then alternates one forward and one backward, then runs the
remaining backward passes (cool-down). Interleaved, micro-batches come in rounds, each of which runs all stages in turn.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

BACKWARD_COST = 2.0  # relative to a forward pass
MAX_PENDING_SENDS = 4  # of a rank that overlaps sends with compute: two in each direction


class Pass(NamedTuple):
    """One stage, one micro-batch, one direction."""

    stage: int  # local index of the rank's stages; pipeline stage `stage * pp + rank`
    micro: int
    forward: bool


def rank_order(pp: int, vp: int | None, ga: int, rank: int) -> list[Pass]:
    """Return all passes of a rank in a step; without a pipeline, forward and backward of each micro-batch in turn."""
    stages = vp or 1
    round_size = ga // max(1, ga // pp) if stages > 1 else 1
    ranks_after = pp - 1 - rank
    warmup = min(ga * stages, (stages - 1) * round_size + 2 * ranks_after if stages > 1 else ranks_after)
    return list(_one_forward_one_backward(ga, stages, round_size, warmup))


def _one_forward_one_backward(ga: int, stages: int, round_size: int, warmup: int) -> Iterator[Pass]:
    """Yield `warmup` forward passes, then alternate forward and backward, then the remaining backward passes."""
    counts: Counter[tuple[int, bool]] = Counter()

    def next_pass(stage: int, forward: bool) -> Pass:
        counts[stage, forward] += 1
        return Pass(stage, counts[stage, forward] - 1, forward)

    for number in range(ga * stages + warmup):
        if number < ga * stages:
            yield next_pass(number // round_size % stages, True)
        if number >= warmup:
            yield next_pass(stages - 1 - (number - warmup) // round_size % stages, False)


def ramp(pp: int, vp: int | None, ga: int) -> float:
    """Return warm-up and cool-down of a rank, in micro-batches; with fewer of them than ranks no rank is ever full.

    Then the first one passes through all stages, and each other follows one stage later.
    """
    stages = vp or 1
    return (pp - 1) / stages + max(0, pp - ga) * (1 - 1 / stages)


def bubble(pp: int, vp: int | None, ga: int) -> float:
    """Return the fraction of a step that a rank waits, with equally fast stages and free communication.

    Computed by simulating the schedule; the closed form (pp - 1) / (vp * ga + pp - 1) gives the same for whole rounds:
    with 16 micro-batches 8 ranks are idle for 7 / (16 + 7) = 30 % of the time; with 8 stages each, for
    7 / (8 * 16 + 7) = 5 %.
    """
    orders = [rank_order(pp, vp, ga, rank) for rank in range(pp)]
    stages = pp * (vp or 1)
    finish: dict[tuple[int, int, bool], float] = {}
    clocks, positions = [0.0] * pp, [0] * pp
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                local_stage, micro, forward = order[positions[rank]]
                stage = local_stage * pp + rank
                dependency = _dependency(stage, stages, micro, forward)
                if dependency is not None and dependency not in finish:
                    break
                start = max(clocks[rank], finish[dependency] if dependency is not None else 0.0)
                clocks[rank] = finish[stage, micro, forward] = start + (1.0 if forward else BACKWARD_COST)
                positions[rank] += 1
                progress = True
    busy = ga * (vp or 1) * (1.0 + BACKWARD_COST)
    return 1 - busy / max(clocks)


def _dependency(stage: int, stages: int, micro: int, forward: bool) -> tuple[int, int, bool] | None:
    """Return the pass whose output this one needs."""
    if forward:
        return (stage - 1, micro, True) if stage else None
    return (stage + 1, micro, False) if stage < stages - 1 else (stage, micro, True)
