"""Pareto set of two figures that should both be high, and its knee.

    pareto_set([(50, 100), (20, 400), (10, 300)]) -> [0, 1]      the third point is worse than the second in both
    knee([(50, 100), (40, 350), (20, 400)])       -> 1

The knee is the point of the Pareto set farthest above the straight line between the two ends of the set, with the
logarithms of both axes scaled to 0..1 over the set: before it throughput is cheap in speed per user, after it dear. On
linear axes a ladder of concurrency that begins at 1 is hollow, with no point above the line. A set of fewer than three
points, or one without a point above that line, has none.
"""

from collections.abc import Sequence
from math import isfinite, log

Point = tuple[float, float]
FEWEST = 3  # points of a set with a knee


def pareto_set(points: Sequence[Point]) -> list[int]:
    """Return the indices of points that no other dominates, by falling x; of equal points the first."""
    order = sorted(
        (i for i, point in enumerate(points) if all(map(isfinite, point))),
        key=lambda i: (-points[i][0], -points[i][1], i),
    )
    front: list[int] = []
    for i in order:
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


def knee(points: Sequence[Point]) -> int | None:
    """Return the index of the knee among these points, or None."""
    front = pareto_set(points)
    if len(front) < FEWEST or min(points[front[-1]][0], points[front[0]][1]) <= 0:
        return None
    first, last = points[front[0]], points[front[-1]]
    width, height = log(first[0] / last[0]), log(last[1] / first[1])  # both above 0 for points of a set

    def excess(i: int) -> float:
        x, y = log(points[i][0] / last[0]) / width, log(points[i][1] / first[1]) / height
        return x + y - 1  # above the line from (1, 0) to (0, 1), times sqrt(2)

    best = max(front[1:-1], key=excess)
    return best if excess(best) > 0 else None
