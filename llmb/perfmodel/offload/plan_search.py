"""Search for the plan with the least predicted time among those that fit given budgets.

    result = best_plan(model, PlanConstraints(dtype="bf16", seqlen=65536, host_gib=178, device_gib=78), rates)

Many candidates are enumerated: chunk sizes, groups per round, fractions of weights, gradients and state that are
resident, and of activations that are fully saved. A lower bound sorts them: no stream can finish before its own work.
The most promising are simulated, then the neighbours of the fastest. Nothing is a fixed proportion; the user may fix
any of it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmb.config.model import Model
from llmb.config.offload_plan import PlanConstraints
from llmb.errors import ConfigError
from llmb.perfmodel.garbage_collection import paused_garbage_collection
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.minimum_budgets import minimum_budgets
from llmb.perfmodel.offload.plan_candidate import PlanCandidate, PlanResult
from llmb.perfmodel.offload.shape_costs import StepShape, shape_costs

STEP_TOKENS = 1 << 19  # default of an optimizer step: usual for models of this size
ROUND_TOKENS = 1 << 19  # at most, through all layers together
CHUNKS = (4096, 8192, 16384, 32768)  # tokens: enough for gemms at full speed, and no more memory than that
MAX_CHUNKS = 32  # per sequence
GROUPS = (1, 2, 3, 4, 6, 8, 16, 32)
FRACTIONS = tuple(eighth / 8 for eighth in range(9))
MAX_SHAPES = 8  # examined with finer fractions
MAX_LEADERS = 3  # of them, whose neighbours are simulated
MAX_SIMULATED = 40  # candidates, at first
COPY_SLOWDOWN = 0.01  # fraction of the copy time by which overlapping computation is slower
TASK_BUDGET = 60_000  # tasks simulated in total


@paused_garbage_collection()
def best_plan(model: Model, constraints: PlanConstraints, rates: Rates) -> PlanResult:
    """Return the fastest plan that fits, using a disk only if none fits without, or raise one line."""
    _check(constraints)
    for disk_gib in dict.fromkeys((0.0, constraints.disk_gib)):
        search = _search(model, replace(constraints, disk_gib=disk_gib), rates)
        if search.best:
            return max((result for result, _ in search.best.values()), key=_speed)
    raise ConfigError(_budget_error(model, constraints, rates))


def _search(model: Model, constraints: PlanConstraints, rates: Rates) -> "_Search":
    coarse = (
        candidate
        for shape in _step_shapes(constraints)
        for candidate in _candidates(model, constraints, rates, shape, FRACTIONS[::2])
    )
    fitting = sorted((candidate for candidate in coarse if candidate.fits), key=_bound_key)
    shapes = list(dict.fromkeys(candidate.shape for candidate in fitting))[:MAX_SHAPES]
    fine = (candidate for shape in shapes for candidate in _candidates(model, constraints, rates, shape, FRACTIONS))
    search = _Search()
    search.try_all(_diverse(sorted((candidate for candidate in fine if candidate.fits), key=_bound_key)))
    for shape in search.leaders():
        while search.try_all(search.best[shape][1].neighbours()):
            pass
    return search


class _Search:
    """Fastest simulated candidate of each shape; ends when the budget of simulated tasks is spent."""

    def __init__(self) -> None:
        self.best: dict[StepShape, tuple[PlanResult, PlanCandidate]] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._left = TASK_BUDGET

    def leaders(self) -> list[StepShape]:
        """Return the shapes whose best candidates have neighbours worth simulating."""
        return sorted(self.best, key=lambda shape: -_speed(self.best[shape][0]))[:MAX_LEADERS]

    def try_all(self, candidates: Iterable[PlanCandidate]) -> bool:
        """Return whether one of them is faster than all before of its shape."""
        is_faster = False
        for candidate in candidates:
            if candidate.signature in self._seen or not candidate.fits or (self._left < 0 and self.best):
                continue
            self._seen.add(candidate.signature)
            self._left -= 2 * len(candidate.plan.levels) * min(candidate.plan.rounds + 2, 5)
            result = candidate.simulate_plan()
            before = self.best.get(candidate.shape)
            if result is not None and (before is None or _speed(result) > _speed(before[0])):
                self.best[candidate.shape], is_faster = (result, candidate), True
        return is_faster


def _bound_key(candidate: PlanCandidate) -> tuple[int, float]:
    """Return the lower bound per sequence, values within 0.2 % counting as equal; of these the link's bound decides."""
    seconds, link = candidate.lower_bound_s
    return round(500 * math.log(seconds / candidate.shape.gbs)), link / candidate.shape.gbs


def _speed(result: PlanResult) -> float:
    """Return tokens/s. Copies take a little memory bandwidth from the computation they overlap with."""
    simulation = result.simulation
    copying = max(simulation.inbound_s, simulation.outbound_s)
    return result.plan.step_tokens / (simulation.step_s + COPY_SLOWDOWN * copying)


def _diverse(candidates: list[PlanCandidate]) -> list[PlanCandidate]:
    """Return the most promising of each shape and fraction of full saves; of equals three that differ much."""
    groups: dict[tuple[StepShape, float], list[PlanCandidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.shape, candidate.full_fraction), []).append(candidate)
    chosen = []
    for group in groups.values():
        equal = [candidate for candidate in group if _bound_key(candidate)[0] == _bound_key(group[0])[0]]
        chosen += [equal[0], equal[len(equal) // 2], equal[-1]]
    return sorted(chosen, key=_bound_key)[:MAX_SIMULATED]


def _step_shapes(constraints: PlanConstraints) -> Iterator[StepShape]:
    seqlen = constraints.seqlen
    usual = [chunk for chunk in CHUNKS if chunk * MAX_CHUNKS >= seqlen] or CHUNKS[-1:]
    for chunk in (constraints.chunk_tokens,) if constraints.chunk_tokens else usual:
        group_seqs = max(1, chunk // seqlen)
        chunks = -(-seqlen // chunk)
        rows = group_seqs * seqlen if chunks == 1 else min(chunk, -(-seqlen // chunks // 64) * 64)  # equal chunks
        for groups in GROUPS if constraints.seqs_per_round is None else (-(-constraints.seqs_per_round // group_seqs),):
            sequences = groups * group_seqs
            if groups > 1 and sequences * seqlen > ROUND_TOKENS and constraints.seqs_per_round is None:
                continue
            gbs = constraints.gbs or max(1, round(STEP_TOKENS / seqlen / sequences)) * sequences
            if sequences <= gbs or groups == 1:
                yield StepShape(gbs, rows if constraints.chunk_tokens is None else chunk, min(group_seqs, gbs), groups)


def _candidates(
    model: Model, constraints: PlanConstraints, rates: Rates, shape: StepShape, fractions: tuple[float, ...]
) -> Iterator[PlanCandidate]:
    buckets = ParamBuckets(model).count
    costs = shape_costs(model, constraints, shape, rates)

    def choices(override: int | None, fractions: tuple[float, ...]) -> list[int]:
        if override is not None:
            return [min(override, buckets)]
        return sorted({round(fraction * buckets) for fraction in fractions})

    trained = fractions if constraints.lora is None else (0.0,)
    for params in choices(constraints.resident_params, fractions):
        for grads in choices(constraints.resident_grads, trained):
            for states in choices(constraints.resident_states, trained[::2]):
                for fraction in (1.0, 0.7, 0.4, 0.0) if constraints.full_saves is None else (1.0,):
                    resident = params, grads, states
                    yield PlanCandidate(
                        model, constraints, rates, shape, costs, resident, fraction
                    ).with_least_on_disk()


def _check(constraints: PlanConstraints) -> None:
    for name in ("host_gib", "device_gib"):
        if not getattr(constraints, name) > 0:
            raise ConfigError(f"{name} must be more than 0 GiB, got {getattr(constraints, name):g}")
    if not constraints.disk_gib >= 0:
        raise ConfigError(f"disk_gib must be 0 GiB or more, got {constraints.disk_gib:g}")
    for name in ("seqlen", "gbs", "chunk_tokens", "seqs_per_round"):
        value = getattr(constraints, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    if (
        constraints.chunk_tokens
        and constraints.seqlen < constraints.chunk_tokens
        and constraints.chunk_tokens % constraints.seqlen
    ):
        raise ConfigError(
            f"chunk_tokens={constraints.chunk_tokens} must hold whole sequences of {constraints.seqlen} tokens; "
            f"try {constraints.chunk_tokens // constraints.seqlen * constraints.seqlen}"
        )


def _budget_error(model: Model, constraints: PlanConstraints, rates: Rates) -> str:
    def fits(host_gib: float, device_gib: float, disk_gib: float = constraints.disk_gib) -> bool:
        enlarged = replace(constraints, host_gib=host_gib, device_gib=device_gib, disk_gib=disk_gib)
        return any(
            candidate.fits
            for shape in _step_shapes(enlarged)
            for candidate in _candidates(model, enlarged, rates, shape, FRACTIONS[::4])
        )

    message = (
        f"{model.name} at {constraints.seqlen} tokens does not fit into {constraints.host_gib:g} GiB of host memory"
    )
    needed = minimum_budgets(fits, constraints.host_gib, constraints.device_gib, constraints.disk_gib)
    if not constraints.disk_gib:
        return f"{message} and {constraints.device_gib:g} GiB of device memory: {needed}"
    device = f"{constraints.device_gib:g} GiB of device memory"
    return f"{message}, {device} and {constraints.disk_gib:g} GiB of disk: {needed}"
