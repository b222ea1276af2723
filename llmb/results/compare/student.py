"""Quantiles of Student's distribution, exact for whole degrees of freedom."""

from functools import cache
from math import atan, cos, pi, sin, sqrt


def student_probability(t: float, freedom: int) -> float:
    """Return the probability that |T| <= t, by the finite series for whole degrees of freedom."""
    angle = atan(t / sqrt(freedom))
    term = total = cos(angle) if freedom % 2 else 1.0
    for k in range(freedom % 2 + 2, freedom - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    if freedom % 2 == 0:
        return sin(angle) * total
    return 2 / pi * (angle + (sin(angle) * total if freedom > 1 else 0.0))


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return t so that |T| <= t with this probability, for at least one degree of freedom."""
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, freedom) < probability else (low, middle)
    return high
