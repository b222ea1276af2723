"""Fit of the serving constants to published TTFT and TPOT: all rows are timed at once, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from llmb.perfmodel.serving_time.closed_loop import Load, load_of, loop_times
from llmb.perfmodel.serving_time.serving_constants import serving_constants
from llmb.perfmodel.serving_time.serving_rows import ServingRow
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import ServingRates, serving_rates
from llmb.perfmodel.serving_time.serving_work import ServingWork, serving_work
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.fitted_constants import Constants
from prediction.log_fit import ROUNDS, group_weights, least_squares

METRICS = ("ttft", "tpot", "e2e")
TPOT_NOISE, TTFT_NOISE = 0.07, 0.30  # log standard deviation of published values


@dataclass(frozen=True)
class Sample:
    """A usable row."""

    row: ServingRow
    setup: ServingSetup
    work: ServingWork
    load: Load
    ttft: float  # seconds
    tpot: float

    @property
    def e2e(self) -> float:
        return self.ttft + (self.setup.osl - 1) * self.tpot

    @property
    def model(self) -> str:
        return self.setup.shape.model.name

    @property
    def series(self) -> tuple[object, ...]:
        """Rows that are not independent of one another."""
        return self.model, self.setup.generation, self.setup.gpu, self.setup.dtype


def sample(row: ServingRow) -> Sample:
    """Return a row with its work and load."""
    assert row.setup is not None
    assert row.ttft_ms is not None
    assert row.tpot_ms is not None
    work = serving_work(row.setup)
    return Sample(row, row.setup, work, load_of(row.setup, work), row.ttft_ms / 1e3, row.tpot_ms / 1e3)


@dataclass(frozen=True)
class Predicted:
    """Seconds of every row."""

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray


class Rows:
    """Samples as arrays, timed together."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.work: Any = _stacked(ServingWork, [s.work for s in samples])
        self.load: Any = _stacked(Load, [s.load for s in samples])
        self.osl = np.array([s.setup.osl for s in samples])
        self.measured = Predicted(*(np.array([getattr(s, name) for s in samples]) for name in ("ttft", "tpot", "e2e")))
        kinds = [
            (s.setup.gpu, s.setup.dtype, s.setup.generation, s.setup.ep, s.setup.tp * s.setup.attention_dp,
             s.setup.shape.model.mla is not None, s.setup.shape.model.experts is not None)
            for s in samples
        ]  # fmt: skip
        first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
        self.kinds = list(first.values())
        order = {kind: place for place, kind in enumerate(first)}
        self.kind_of = np.array([order[kind] for kind in kinds])

    def predict(self, c: Constants) -> Predicted:
        """Return the predicted times."""
        setups = [self.samples[index].setup for index in self.kinds]
        rates = [serving_rates(setup, device(setup.gpu), c) for setup in setups]
        stacked: Any = _stacked(ServingRates, rates, self.kind_of)
        times = loop_times(self.work, self.load, stacked, c["queue"])
        return Predicted(times.ttft, times.tpot, times.ttft + (self.osl - 1) * times.tpot)

    def log_errors(self, c: Constants) -> Predicted:
        """Return log(predicted / measured) of every metric."""
        p, m = self.predict(c), self.measured
        return Predicted(np.log(p.ttft / m.ttft), np.log(p.tpot / m.tpot), np.log(p.e2e / m.e2e))


def _stacked(kind: type[Any], items: Sequence[Any], index: Any = slice(None)) -> Any:
    """Return one instance whose fields are arrays over items."""
    return kind(**{f.name: np.array([getattr(item, f.name) for item in items])[index] for f in fields(kind)})


def fitted(samples: Sequence[Sample], rounds: int = ROUNDS) -> Constants:
    """Return the constants fitted to samples, from their priors."""
    rows = Rows(samples)

    def errors_of(c: Constants) -> np.ndarray:
        errors = rows.log_errors(c)
        return np.concatenate([errors.tpot, errors.ttft])

    weights = group_weights([s.series for s in samples])
    noise = np.repeat([TPOT_NOISE, TTFT_NOISE], len(samples))
    start = {name: constant.prior for name, constant in serving_constants().items()}
    return least_squares(errors_of, noise, np.tile(weights, 2), serving_constants(), start, rounds)
