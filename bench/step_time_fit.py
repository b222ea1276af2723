"""Fit of the step-time constants to published rows: Gauss-Newton on log step times, with priors and robust weights.

Deterministic. A row counts less the more rows share its model, GPU and dtype, and less the further it is from the
prediction (Cauchy weights), so that one series or one outlier does not decide.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from llmb.perfmodel.step_time.step_constants import Constants, constants
from llmb.perfmodel.step_time.waterfall import StepWork, step_terms

NOISE = 0.05  # of a published step time: the same configuration differs by about this between releases
ROUNDS = 8
DIFFERENCE = 0.01  # in log space


def log_errors(steps: Sequence[StepWork], measured: Sequence[float], c: Constants) -> np.ndarray:
    """Return log(predicted / measured) of every row."""
    unique = {id(step): step for step in steps}
    seconds = {key: sum(step_terms(step, c).values()) for key, step in unique.items()}
    return np.log(np.array([seconds[id(step)] for step in steps]) / np.array(measured))


def group_weights(groups: Sequence[object]) -> np.ndarray:
    """Return the weight of each row: a group of n rows counts as much as sqrt(n) single ones."""
    sizes = Counter(groups)
    return np.array([1 / math.sqrt(sizes[group]) for group in groups])


def fit(
    steps: Sequence[StepWork],
    measured: Sequence[float],
    groups: Sequence[object],
    start: Constants,
    rounds: int = ROUNDS,
) -> Constants:
    """Return the constants of least weighted error, near their priors."""
    names = list(constants())
    prior = np.log([constants()[name].prior for name in names])
    precision = np.diag([constants()[name].spread ** -2.0 for name in names])
    x, weights = np.log([start[name] for name in names]), group_weights(groups)
    for _ in range(rounds):
        errors = log_errors(steps, measured, _constants(names, x))
        jacobian = np.empty((len(steps), len(names)))
        for index in range(len(names)):
            shifted = x.copy()
            shifted[index] += DIFFERENCE
            jacobian[:, index] = (log_errors(steps, measured, _constants(names, shifted)) - errors) / DIFFERENCE
        w = weights / (NOISE**2 * (1 + (errors / (2 * NOISE)) ** 2))
        gradient = jacobian.T @ (w * errors) + precision @ (x - prior)
        step = np.linalg.solve(jacobian.T @ (w[:, None] * jacobian) + precision, gradient)
        x = x - np.clip(step, -0.3, 0.3)
    return _constants(names, x)


def _constants(names: Sequence[str], x: np.ndarray) -> Constants:
    return dict(zip(names, np.exp(x).tolist(), strict=True))
