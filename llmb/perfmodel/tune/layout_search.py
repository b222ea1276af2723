"""Search of the layout with the least predicted step time that fits in memory.

    result = search_layouts(setup, {"tp": 8})
    result.best.setup, result.best.seconds, result.pareto

All layouts of the space are predicted, some ten thousand for a mixture of experts, in a few seconds. Memory, which is
dear for the native engine, is estimated from the fastest one on, up to those that are half as slow again as the best.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmb.perfmodel.step_time.predictor import constants_of
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import RankWork
from llmb.perfmodel.step_time.waterfall import step_terms, step_work
from llmb.perfmodel.tune.layout_space import check_fixed, layout_space
from llmb.perfmodel.tune.memory_savings import (
    MemoryRoom,
    copies_are_hidden,
    external_room,
    fitting_variants,
    smallest_variant,
    with_offload,
    with_recompute,
)
from llmb.perfmodel.tune.pareto import pareto_set

SLOWEST = 1.5  # times the fastest: slower layouts are left out, however small
EXTENDED = 100  # fastest candidates that are also tried with every layer recomputed


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted time and estimated memory."""

    setup: StepSetup
    seconds: float
    memory: float  # bytes on the fullest GPU


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """Outcome of a search."""

    candidates: tuple[Candidate, ...]  # that fit, fastest first
    considered: int  # layouts with their micro-batch sizes
    room: MemoryRoom
    smallest: Candidate | None  # of layouts that do not fit, recomputed as far as allowed; none: some fit

    @property
    def limit(self) -> float:
        """Bytes that a candidate may take."""
        return self.room.limit

    @property
    def pareto(self) -> list[Candidate]:
        """Candidates than which no other is both faster and smaller, fastest first."""
        points = [(-candidate.seconds, -candidate.memory) for candidate in self.candidates]
        return [self.candidates[index] for index in pareto_set(points)]


def search_layouts(
    base: StepSetup,
    fixed: Mapping[str, Any],
    room: MemoryRoom | None = None,
    is_runnable: Callable[[StepSetup], bool] | None = None,
) -> LayoutSearch:
    """Predict every layout of a run that fits; `is_runnable` leaves out those that an engine refuses."""
    check_fixed(base, fixed)
    room = room or external_room(base)
    setups = list(layout_space(base, fixed))
    runnable = setups if is_runnable is None else [setup for setup in setups if is_runnable(setup)]
    candidates: list[Candidate] = []
    fastest, times = math.inf, StepTimes()
    for seconds, setup in sorted(((times.seconds(setup), setup) for setup in runnable), key=lambda pair: pair[0]):
        if seconds > SLOWEST * fastest:  # recompute would make it slower still
            break
        for variant, estimate in fitting_variants(setup, fixed, room):
            candidate = Candidate(variant, times.seconds(variant), estimate.total)
            if copies_are_hidden(variant, estimate.host, candidate.seconds):
                candidates.append(candidate)
                fastest = min(fastest, candidate.seconds)
    if "recompute_layers" not in fixed and "offload_layers" not in fixed:
        candidates += _all_recomputed(sorted(candidates, key=_rank)[:EXTENDED], room, times)
    return LayoutSearch(
        candidates=tuple(sorted(candidates, key=_rank)),
        considered=len(setups),
        room=room,
        smallest=None if candidates else _smallest(runnable, fixed, room, times),
    )


@dataclass
class StepTimes:
    """Predicted step times of layouts of one run; those that differ in schedule only share the work of their rank."""

    works: dict[tuple[Any, ...], RankWork] = field(default_factory=dict)

    def seconds(self, setup: StepSetup) -> float:
        """Return the predicted step time."""
        split = setup.parallel
        key = (split.tp, split.cp, split.pp, split.ep, split.etp, split.fsdp, setup.mbs)
        step = step_work(setup, work=self.works.get(key))
        self.works[key] = step.work
        return sum(step_terms(step, constants_of(setup)).values())


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.seconds, candidate.memory


def _all_recomputed(candidates: list[Candidate], room: MemoryRoom, times: StepTimes) -> list[Candidate]:
    """Return the same layouts with every layer recomputed: the low-memory end of the Pareto set."""
    listed = {candidate.setup for candidate in candidates}
    setups = dict.fromkeys(
        with_recompute(with_offload(c.setup, 0), c.setup.most_layers) for c in candidates
    )  # two variants of a layout become one
    return [Candidate(s, times.seconds(s), room.estimate(s).total) for s in setups if s not in listed]


def _smallest(
    setups: list[StepSetup], fixed: Mapping[str, Any], room: MemoryRoom, times: StepTimes
) -> Candidate | None:
    """Return the layout with the least memory, with as much recompute as is allowed; None: there is none."""
    recomputed = [smallest_variant(setup, fixed) for setup in setups]
    totals = [(room.estimate(setup).total, setup) for setup in recomputed]
    memory, setup = min(totals, key=lambda pair: pair[0], default=(math.inf, None))
    return None if setup is None else Candidate(setup, times.seconds(setup), memory)
