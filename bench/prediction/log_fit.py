"""Least squares on logarithms: Gauss-Newton with priors and robust (Cauchy) weights. Deterministic."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llmb.perfmodel.step_time.fitted_constants import Constant, Constants

ROUNDS = 8
DIFFERENCE = 0.01  # in log space
LARGEST_STEP = 0.3


def group_weights(groups: Sequence[object]) -> np.ndarray:
    """Return the weight of each row: a group of n rows counts as much as sqrt(n) single ones."""
    sizes = Counter(groups)
    return np.array([1 / math.sqrt(sizes[group]) for group in groups])


def least_squares(
    errors_of: Callable[[Constants], np.ndarray],
    noise: np.ndarray | float,
    weights: np.ndarray,
    constants: Mapping[str, Constant],
    start: Constants,
    rounds: int = ROUNDS,
) -> Constants:
    """Return the constants near their priors with the least weighted log errors.

    `noise`: standard deviation of a log error; beyond twice as much an error counts less and less.
    """
    names = list(constants)
    prior = np.log([constants[name].prior for name in names])
    precision = np.diag([constants[name].spread ** -2.0 for name in names])
    x = np.log([start[name] for name in names])
    for _ in range(rounds):
        errors = errors_of(_constants(names, x))
        jacobian = np.empty((len(errors), len(names)))
        for index in range(len(names)):
            shifted = x.copy()
            shifted[index] += DIFFERENCE
            jacobian[:, index] = (errors_of(_constants(names, shifted)) - errors) / DIFFERENCE
        w = weights / (noise**2 * (1 + (errors / (2 * noise)) ** 2))
        gradient = jacobian.T @ (w * errors) + precision @ (x - prior)
        step = np.linalg.solve(jacobian.T @ (w[:, None] * jacobian) + precision, gradient)
        x = x - np.clip(step, -LARGEST_STEP, LARGEST_STEP)
    return _constants(names, x)


def _constants(names: Sequence[str], x: np.ndarray) -> Constants:
    return dict(zip(names, np.exp(x).tolist(), strict=True))
