"""Fit of the step-time constants to published rows: Gauss-Newton on log step times, with priors and robust weights.

Deterministic. A row counts less the more rows share its model, GPU and dtype, and less the further it is from the
prediction (Cauchy weights), so that one series or one outlier does not decide.
"""

from collections.abc import Sequence

import numpy as np

from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.step_constants import constants
from llmb.perfmodel.step_time.waterfall import StepWork, step_terms
from prediction.log_fit import ROUNDS, group_weights, least_squares

NOISE = 0.05  # of a published step time: the same configuration differs by about this between releases


def log_errors(steps: Sequence[StepWork], measured: Sequence[float], c: Constants) -> np.ndarray:
    """Return log(predicted / measured) of every row."""
    unique = {id(step): step for step in steps}
    seconds = {key: sum(step_terms(step, c).values()) for key, step in unique.items()}
    return np.log(np.array([seconds[id(step)] for step in steps]) / np.array(measured))


def fit(
    steps: Sequence[StepWork],
    measured: Sequence[float],
    groups: Sequence[object],
    start: Constants,
    rounds: int = ROUNDS,
) -> Constants:
    """Return the constants of least weighted error, near their priors."""
    return least_squares(
        lambda c: log_errors(steps, measured, c), NOISE, group_weights(groups), constants(), start, rounds
    )
