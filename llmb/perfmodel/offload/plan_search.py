"""The plan with the least predicted time among those that fit given budgets.

    planned = best_plan(model, Wishes(dtype="bf16", seqlen=65536, host_gib=178, device_gib=78), rates)

Many drafts are made: chunk sizes, groups a round, shares of weights, gradients and state that stay on the device, and
of activations that are kept whole. A bound sorts them: no lane can be done sooner than its own work. The most promising
are simulated, and those near the fastest of them. Nothing is a fixed proportion; the user may fix any of it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.perfmodel.offload.buffers import Units
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.minimum_budgets import smallest_budgets
from llmb.perfmodel.offload.plan_candidate import Draft, Planned, Shape, Wishes, facts_of

STEP_TOKENS = 1 << 19  # of an optimizer step, where the user does not say: what models of this size are trained with
ROUND_TOKENS = 1 << 19  # most that go through the layers together
CHUNKS = (4096, 8192, 16384, 32768)  # tokens: enough for matrix products at full speed, and no more memory than that
MOST_CHUNKS = 32  # of a sequence
GROUPS = (1, 2, 3, 4, 6, 8, 16, 32)
SHARES = tuple(eighth / 8 for eighth in range(9))
SHAPES = 8  # whose shares are looked at more closely
LEADERS = 3  # of them, whose neighbours are looked at
SIMULATED = 40  # of the drafts, at first
BESIDE_COPIES = 0.01  # of their time is lost to computation
EFFORT = 60_000  # computations that are simulated in all


def best_plan(model: Model, wishes: Wishes, rates: Rates) -> Planned:
    """The fastest that fits, or one line with the smallest budgets that would do."""
    _check(model, wishes)
    coarse = (draft for shape in _shapes(wishes) for draft in _drafts(model, wishes, rates, shape, SHARES[::2]))
    fitting = sorted((draft for draft in coarse if draft.fits), key=_promise)
    shapes = list(dict.fromkeys(draft.shape for draft in fitting))[:SHAPES]
    fine = (draft for shape in shapes for draft in _drafts(model, wishes, rates, shape, SHARES))
    search = _Search()
    search.try_all(_varied(sorted((draft for draft in fine if draft.fits), key=_promise)))
    for shape in search.leaders():
        while search.try_all(search.best[shape][1].neighbours()):
            pass
    if not search.best:
        raise ConfigError(_too_small(model, wishes, rates))
    return max((planned for planned, _ in search.best.values()), key=_speed)


class _Search:
    """The fastest drafts of those gone through, one for each shape; it ends when enough work was simulated."""

    def __init__(self) -> None:
        self.best: dict[Shape, tuple[Planned, Draft]] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._left = EFFORT

    def leaders(self) -> list[Shape]:
        """The shapes near whose best drafts it is worth while to look."""
        return sorted(self.best, key=lambda shape: -_speed(self.best[shape][0]))[:LEADERS]

    def try_all(self, drafts: Iterable[Draft]) -> bool:
        """Whether one of them is faster than all before of its shape."""
        found = False
        for draft in drafts:
            if draft.mark in self._seen or not draft.fits or (self._left < 0 and self.best):
                continue
            self._seen.add(draft.mark)
            self._left -= 2 * len(draft.plan.levels) * min(draft.plan.rounds + 2, 5)
            planned = draft.planned()
            before = self.best.get(draft.shape)
            if planned is not None and (before is None or _speed(planned) > _speed(before[0])):
                self.best[draft.shape], found = (planned, draft), True
        return found


def _promise(draft: Draft) -> tuple[int, float]:
    """Seconds a sequence at least, those within a five-hundredth counting alike; of these the link's decide."""
    seconds, link = draft.bound_s
    return round(500 * math.log(seconds / draft.shape.gbs)), link / draft.shape.gbs


def _speed(planned: Planned) -> float:
    """Tokens a second. Copies take a little of the memory's speed from the computation beside them."""
    simulated = planned.simulated
    copying = max(simulated.inbound_s, simulated.outbound_s)
    return planned.plan.step_tokens / (simulated.step_s + BESIDE_COPIES * copying)


def _varied(drafts: list[Draft]) -> list[Draft]:
    """The most promising of each way to cut the tokens and to keep activations; of equals three that differ much."""
    alike: dict[tuple[Shape, float], list[Draft]] = {}
    for draft in drafts:
        alike.setdefault((draft.shape, draft.full_share), []).append(draft)
    chosen = []
    for some in alike.values():
        equal = [draft for draft in some if _promise(draft)[0] == _promise(some[0])[0]]
        chosen += [equal[0], equal[len(equal) // 2], equal[-1]]
    return sorted(chosen, key=_promise)[:SIMULATED]


def _shapes(wishes: Wishes) -> Iterator[Shape]:
    seqlen = wishes.seqlen
    usual = [chunk for chunk in CHUNKS if chunk * MOST_CHUNKS >= seqlen] or CHUNKS[-1:]
    for chunk in (wishes.chunk_tokens,) if wishes.chunk_tokens else usual:
        together = max(1, chunk // seqlen)
        pieces = -(-seqlen // chunk)
        rows = together * seqlen if pieces == 1 else min(chunk, -(-seqlen // pieces // 64) * 64)  # equal parts
        for groups in GROUPS if wishes.seqs_per_round is None else (-(-wishes.seqs_per_round // together),):
            sequences = groups * together
            if groups > 1 and sequences * seqlen > ROUND_TOKENS and wishes.seqs_per_round is None:
                continue
            gbs = wishes.gbs or max(1, round(STEP_TOKENS / seqlen / sequences)) * sequences
            if sequences <= gbs or groups == 1:
                yield Shape(gbs, rows if wishes.chunk_tokens is None else chunk, min(together, gbs), groups)


def _drafts(model: Model, wishes: Wishes, rates: Rates, shape: Shape, shares: tuple[float, ...]) -> Iterator[Draft]:
    units = Units(model).count
    facts = facts_of(model, wishes, shape, rates)

    def choices(asked: int | None, some: tuple[float, ...]) -> list[int]:
        return [min(asked, units)] if asked is not None else sorted({round(share * units) for share in some})

    for params in choices(wishes.resident_params, shares):
        for grads in choices(wishes.resident_grads, shares):
            for states in choices(wishes.resident_states, shares[::2]):
                for share in (1.0, 0.7, 0.4, 0.0) if wishes.full_saves is None else (1.0,):
                    yield Draft(model, wishes, rates, shape, facts, (params, grads, states), share)


def _check(model: Model, wishes: Wishes) -> None:
    for name in ("host_gib", "device_gib"):
        if not getattr(wishes, name) > 0:
            raise ConfigError(f"{name} must be more than 0 GiB, got {getattr(wishes, name):g}")
    for name in ("seqlen", "gbs", "chunk_tokens", "seqs_per_round"):
        value = getattr(wishes, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    if wishes.chunk_tokens and wishes.seqlen < wishes.chunk_tokens and wishes.chunk_tokens % wishes.seqlen:
        raise ConfigError(
            f"chunk_tokens={wishes.chunk_tokens} must hold whole sequences of {wishes.seqlen} tokens; "
            f"try {wishes.chunk_tokens // wishes.seqlen * wishes.seqlen}"
        )


def _too_small(model: Model, wishes: Wishes, rates: Rates) -> str:
    def fits(host_gib: float, device_gib: float) -> bool:
        tried = replace(wishes, host_gib=host_gib, device_gib=device_gib)
        return any(draft.fits for shape in _shapes(tried) for draft in _drafts(model, tried, rates, shape, SHARES[::4]))

    said = f"{model.name} at {wishes.seqlen} tokens does not fit into {wishes.host_gib:g} GiB of host memory"
    needed = smallest_budgets(fits, wishes.host_gib, wishes.device_gib)
    return f"{said} and {wishes.device_gib:g} GiB of device memory: {needed}"
