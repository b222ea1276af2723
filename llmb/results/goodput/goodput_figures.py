"""Goodput of a run that restarts after failures: useful tokens over wall time, and where the rest of the time went.

    start-up    from the launch to the first step
    steps       of which the run consists, each counted once
    lost        work thrown away: from the newest checkpoint to the fault
    detect      from a fault until the run was known to have failed and its processes had ended
    restart     from then until the next start trained: processes, model, checkpoint, what a first step takes longer
    between     steps: checkpoints, reports; the rest

A slow rank ends nothing: its cost is the time that its steps took above the median, inside `steps`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from llmb.config.spec import RunConfig, Training
from llmb.events import Event, StepDone
from llmb.perfmodel.goodput.checkpoint_interval import best_interval_s, expected_fraction
from llmb.results.goodput.goodput_result import CheckpointAdvice, FaultCost, Goodput, KindCost
from llmb.results.goodput.run_starts import RunStart, run_starts

UNPLANNED = "unplanned"


def goodput(config: RunConfig | None, events: Sequence[Event], throughput: float | None) -> Goodput | None:
    """Return the goodput of a run; None: it does not restart, or did no step. `throughput`: tokens/s of its steps."""
    starts = run_starts(events)
    counted = _counted_steps(starts)
    if config is None or not isinstance(config.workload, Training) or not counted:
        return None
    tokens = sum(step.tokens or 0 for step in counted.values())
    usual_s = median(step.seconds or 0.0 for step in counted.values())
    if throughput and tokens:
        usual_s = tokens / len(counted) / throughput
    for start in starts:
        start.shorten_first_step(usual_s)
    counted = _counted_steps(starts)
    launched, last = starts[0].launched, starts[-1]
    wall_s = (last.ended or (last.steps[-1].time if last.steps else None) or last.launched) - launched
    if wall_s <= 0:
        return None
    costs = [_failure(start, after, launched) for start, after in pairwise(starts)]
    costs += _slow_ranks(config, starts, usual_s, launched)
    startup_s = (starts[0].trained_from or starts[0].ended or launched) - launched
    seconds = {
        "start-up": startup_s,
        "steps": sum(step.seconds or 0.0 for step in counted.values()),
        "lost": sum(cost.lost_s for cost in costs if cost.steps_lost is not None),
        "detect": sum(cost.detect_s or 0.0 for cost in costs),
        "restart": sum(cost.restart_s or 0.0 for cost in costs),
    }
    seconds["between"] = max(0.0, wall_s - sum(seconds.values()))
    rate = tokens / wall_s
    plan = config.fault_injection
    return Goodput(
        injected=None if plan is None else plan.source,
        planned_faults=0 if plan is None else len(plan.faults),
        restarts=len(starts) - 1,
        wall_s=wall_s,
        useful_tokens=tokens,
        tokens_per_s=rate,
        fraction=rate / throughput if throughput else None,
        seconds=seconds,
        faults=tuple(sorted(costs, key=lambda cost: cost.at_s)),
        by_kind=_by_kind(costs),
        checkpoints=_checkpoints(config, starts, costs, usual_s, startup_s, len(counted)),
        **_repeated(starts),
    )


def _counted_steps(starts: Sequence[RunStart]) -> dict[int, StepDone]:
    """Return each step as it was done last: what the run consists of."""
    return {step.step: step for start in starts for step in start.steps}


def _failure(start: RunStart, after: RunStart, launched: float) -> FaultCost:
    """Return what the end of one start cost, until the next one trained."""
    fault = start.fatal_fault
    ended = start.ended if start.ended is not None else after.launched
    struck = fault.time if fault is not None else start.steps[-1].time if start.steps else start.launched
    assert struck is not None
    lost_from = start.began_after(after.resumed_step)
    resumed = after.trained_from or after.ended
    return FaultCost(
        kind=fault.kind if fault is not None else UNPLANNED,
        step=fault.step if fault is not None else start.last_step + 1,
        rank=None if fault is None else fault.rank,
        at_s=struck - launched,
        detect_s=max(0.0, ended - struck),
        restart_s=None if resumed is None else max(0.0, resumed - ended),
        steps_lost=max(0, start.last_step - after.resumed_step),
        lost_s=0.0 if lost_from is None else max(0.0, struck - lost_from),
        reason=start.reason,
    )


def _slow_ranks(config: RunConfig, starts: Sequence[RunStart], usual_s: float, launched: float) -> list[FaultCost]:
    """Return the cost of slow ranks: the time of their steps above the median of all."""
    plan, costs = config.fault_injection, []
    for start in starts:
        for event in start.faults:
            if event.kind == "slow_rank" and plan is not None and 0 <= event.fault < len(plan.faults):
                slow = range(event.step, event.step + plan.faults[event.fault].slow_steps)
                delays = [max(0.0, (s.seconds or 0.0) - usual_s) for s in start.steps if s.step in slow]
                at_s = event.time - launched
                costs.append(
                    FaultCost(kind=event.kind, step=event.step, rank=event.rank, at_s=at_s, lost_s=sum(delays))
                )
    return costs


def _by_kind(costs: Sequence[FaultCost]) -> dict[str, KindCost]:
    kinds: dict[str, list[FaultCost]] = {}
    for cost in costs:
        kinds.setdefault(cost.kind, []).append(cost)
    return {kind: _kind_cost(same) for kind, same in sorted(kinds.items())}


def _kind_cost(costs: Sequence[FaultCost]) -> KindCost:
    lost = [cost.steps_lost for cost in costs if cost.steps_lost is not None]
    return KindCost(
        faults=len(costs),
        detect_s=_mean([cost.detect_s for cost in costs]),
        restart_s=_mean([cost.restart_s for cost in costs]),
        steps_lost=sum(lost) if lost else None,
        lost_s=sum(cost.lost_s for cost in costs),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _repeated(starts: Sequence[RunStart]) -> dict[str, Any]:
    """Count the steps that were done more than once, and those of them whose loss or gradient norm differs."""
    runs: dict[int, list[StepDone]] = {}
    for start in starts:
        for step in start.steps:
            runs.setdefault(step.step, []).append(step)
    repeated = [same for same in runs.values() if len(same) > 1]
    differ = sum(len({(step.loss, step.grad_norm) for step in same}) > 1 for same in repeated)
    losses = [[step.loss for step in same if step.loss is not None] for same in repeated]
    spread = max((max(same) - min(same) for same in losses if same), default=0.0)
    return {
        "repeated_steps": sum(len(same) - 1 for same in repeated),
        "repeated_losses_differ": differ,
        "largest_loss_difference": spread,
    }


def _checkpoints(
    config: RunConfig,
    starts: Sequence[RunStart],
    costs: Sequence[FaultCost],
    step_s: float,
    startup_s: float,
    steps: int,
) -> CheckpointAdvice | None:
    """Return the interval in use beside the best one; None: no fault ended a start, or no checkpoint was timed."""
    work, plan = config.workload, config.fault_injection
    assert isinstance(work, Training)
    every, failures = work.checkpoint_every, [cost for cost in costs if cost.detect_s is not None]
    gaps = [gap for start in starts for gap in start.gaps()]
    if not every or not failures or not gaps:
        return None
    after_checkpoint = [seconds for step, seconds in gaps if step % every == 0]
    others = [seconds for step, seconds in gaps if step % every]
    if not after_checkpoint:
        return None
    checkpoint_s = max(0.0, fmean(after_checkpoint) - (median(others) if others else 0.0))
    trained_s = sum(_trained_s(start) for start in starts)
    stated = plan.seconds_between if plan is not None else None
    between_s = stated or trained_s / len(failures)
    outage_s = fmean((cost.detect_s or 0.0) + (cost.restart_s or 0.0) for cost in failures)
    if between_s <= 0 or checkpoint_s <= 0 or step_s <= 0:
        return None
    useful_s, interval_s, best_s = steps * step_s, every * step_s, best_interval_s(checkpoint_s, between_s)
    if not math.isfinite(best_s / step_s):
        return None
    best_every = max(1, round(best_s / step_s))

    def fraction(interval: float) -> float:
        """Return the expected goodput, with the first start-up."""
        steady = expected_fraction(interval, checkpoint_s, between_s, outage_s)
        return useful_s / (startup_s + useful_s / steady) if steady else 0.0

    return CheckpointAdvice(
        every_steps=every,
        interval_s=interval_s,
        checkpoint_s=checkpoint_s,
        between_faults_s=between_s,
        between_faults_source="the requested rate" if stated else f"{len(failures)} faults in this run",
        expected_fraction=fraction(interval_s),
        best_interval_s=best_s,
        best_every_steps=best_every,
        best_expected_fraction=fraction(best_every * step_s),
    )


def _trained_s(start: RunStart) -> float:
    """Return how long a start trained: from its first step to its fault, or to its last step."""
    if start.trained_from is None:
        return 0.0
    fault = start.fatal_fault
    until = fault.time if fault is not None else start.steps[-1].time
    return max(0.0, (until or start.trained_from) - start.trained_from)
