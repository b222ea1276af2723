"""Search of serving settings with the most predicted throughput that keep an SLO.

    result = search_serving(setup, gpus=8, limits={"ttft_ms": 500, "tpot_ms": 50})
    result.best.setup, result.best.tokens_per_s_per_gpu, result.pareto

For each layout and token budget the concurrency rises until a limit is exceeded or the KV cache is full; the last one
that keeps the limits is found by bisection, where another layout does not surpass it anyway. A fixed concurrency is
served with batches of any size. TTFT and TPOT are predicted means. The native engine, whose scheduler a prediction
follows step by step, is not predicted under loads that another layout clearly surpasses in throughput and in speed. The
settings to start from are a candidate too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.closed_loop import SEPARATE_PREFILL
from llmb.perfmodel.serving_time.serving_predictor import predict_serving, running_requests
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.tune.pareto import pareto_set
from llmb.perfmodel.tune.serving_candidate import Limits, ServingCandidate, ServingFront
from llmb.perfmodel.tune.serving_space import serving_space

MOST_CLIENTS = 1 << 14  # of one engine
MOST_WAVES = 8  # of a fixed number of clients, after which the drain hardly matters
PRECISION = 0.03  # of the concurrency at a limit


@dataclass(frozen=True, kw_only=True)
class ServingSearch:
    """Outcome of a search."""

    gpus: int
    limits: Limits
    candidates: tuple[ServingCandidate, ...]  # that keep the limits, most throughput first
    considered: int  # layouts with token budgets
    predicted: int  # settings predicted
    least: dict[str, ServingCandidate] = field(default_factory=dict)  # by limited metric: the lowest of all predicted
    misfit: str | None = None  # why the layout that comes nearest does not fit; none: some do

    @property
    def pareto(self) -> list[ServingCandidate]:
        """Candidates than which none has both more tokens/s/GPU and more tokens/s/user, most throughput first."""
        points = [(c.tokens_per_s_per_gpu, c.tokens_per_s_per_user) for c in self.candidates]
        return [self.candidates[index] for index in pareto_set(points)]


def search_serving(
    base: ServingSetup,
    gpus: int,
    limits: Limits,
    fixed: Mapping[str, Any] | None = None,
    is_runnable: Callable[[ServingSetup], bool] | None = None,
) -> ServingSearch:
    """Predict settings of engines on these GPUs; `is_runnable` leaves out those that an engine refuses."""
    fixed = fixed or {}
    ladders: list[list[ServingCandidate]] = []
    front = ServingFront(limits)
    misfit, considered = None, 0
    for setup in serving_space(base, gpus, fixed):
        considered += 1
        if is_runnable is not None and not is_runnable(setup):
            continue
        try:
            ladders.append(list(_loads(setup, front, fixed)))
        except ConfigError as error:  # the weights do not fit
            misfit = str(error)
    loaded = [candidate for ladder in ladders for candidate in ladder]
    loaded += _own_settings(base, gpus, fixed, [candidate.setup for candidate in loaded])
    if "concurrency" not in fixed:
        loaded += _last_passing(ladders, front, fixed.get("max_batch_size"))
    passing = sorted((c for c in loaded if c.keeps(limits)), key=lambda c: -c.tokens_per_s_per_gpu)
    least = {name: min(loaded, key=lambda c: getattr(c.prediction, name)) for name in limits} if loaded else {}
    return ServingSearch(
        gpus=gpus, limits=limits, candidates=tuple(passing), considered=considered, predicted=len(loaded), least=least,
        misfit=None if loaded else misfit,
    )  # fmt: skip


def _own_settings(
    base: ServingSetup, gpus: int, fixed: Mapping[str, Any], predicted: Sequence[ServingSetup]
) -> Iterator[ServingCandidate]:
    """Yield the settings to start from, such as a recipe's, where the search has not met them but may."""
    is_allowed = gpus % base.gpus == 0 and all(getattr(base, name) == value for name, value in fixed.items())
    if is_allowed and base not in predicted:
        with suppress(ConfigError):  # the weights do not fit
            yield ServingCandidate(base, predict_serving(base))


def _loads(setup: ServingSetup, front: ServingFront, fixed: Mapping[str, Any]) -> Iterator[ServingCandidate]:
    """Yield one layout under more and more clients; under a fixed number of them, with larger and larger batches."""
    speed = math.inf  # of users, which falls with the load
    for under_load in _rising_loads(setup, fixed):
        if front.is_hopeless(under_load, speed):
            continue
        candidate = ServingCandidate(under_load, predict_serving(under_load))
        front.add(candidate)
        speed = candidate.tokens_per_s_per_user
        yield candidate
        if "concurrency" not in fixed and not candidate.keeps(front.limits):
            return


def _rising_loads(setup: ServingSetup, fixed: Mapping[str, Any]) -> Iterator[ServingSetup]:
    """Yield one layout with the numbers of clients, or the batches, to try."""
    batch, clients = fixed.get("max_batch_size"), fixed.get("concurrency")
    if clients is not None:
        slots = running_requests(_under_load(setup, clients, MOST_CLIENTS))
        for size in (batch,) if batch else _batches(-(-slots // setup.attention_dp), -(-clients // setup.attention_dp)):
            yield _under_load(setup, clients, size)
        return
    most = min(running_requests(_under_load(setup, MOST_CLIENTS, batch)), setup.attention_dp * _most_decodes(setup))
    for count in _ladder(most):  # more would wait for the cache
        yield _under_load(setup, count, batch)


def _most_decodes(setup: ServingSetup) -> int:
    """Return the requests of a replica that a step computes a token of, where prompts share the steps of decodes."""
    if setup.engine in SEPARATE_PREFILL:
        return MOST_CLIENTS
    return max(1, int(setup.max_num_tokens / (1 + setup.draft_tokens)))


def _batches(most: int, clients: int) -> list[int]:
    """Return batch sizes to try: a ladder, and those that serve the clients in whole waves, which drain together."""
    waves = {-(-clients // count) for count in range(1, MOST_WAVES + 1)}
    return sorted({*_ladder(most), *(size for size in waves if size <= most)})


def _ladder(most: int) -> list[int]:
    """Return the powers of two below a number, three quarters of it, and itself."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return sorted({*powers, max(1, 3 * most // 4), most})


def _last_passing(
    ladders: list[list[ServingCandidate]], front: ServingFront, batch: int | None
) -> Iterator[ServingCandidate]:
    """Yield concurrencies between the last of a ladder that keeps the limits and the one that does not, by bisection.

    A ladder is left out where some candidate has both the throughput of the latter and the speed of the former.
    """
    exceeding = (ladder for ladder in ladders if len(ladder) > 1 and not ladder[-1].keeps(front.limits))
    for ladder in sorted(exceeding, key=lambda ladder: -ladder[-1].tokens_per_s_per_gpu):
        if front.surpasses(ladder[-1].tokens_per_s_per_gpu, ladder[-2].tokens_per_s_per_user):
            continue
        passing, exceeded = ladder[-2].setup.concurrency, ladder[-1].setup.concurrency
        while exceeded - passing > max(1.0, PRECISION * passing):
            under_load = _under_load(ladder[0].setup, (passing + exceeded) // 2, batch)
            candidate = ServingCandidate(under_load, predict_serving(under_load))
            yield candidate
            if candidate.keeps(front.limits):
                passing = candidate.setup.concurrency
                front.add(candidate)
            else:
                exceeded = candidate.setup.concurrency


def _under_load(setup: ServingSetup, clients: int, batch: int | None) -> ServingSetup:
    """Return a setup with a number of clients; without a batch, an engine runs the requests of all of them."""
    return replace(setup, concurrency=clients, max_batch_size=batch or -(-clients // setup.attention_dp))
