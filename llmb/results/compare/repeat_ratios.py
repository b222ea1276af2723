"""Ratios of two configurations that ran several times each, with intervals that hold the noise between runs.

repeat_ratios(runs_a, runs_b) -> (SpeedRatio(ratio=1.02, low=1.01, ...), [])      training
repeat_ratios(runs_a, runs_b) -> (None, [RequestRatio(figure="ttft_ms", ...)])    serving
"""

from collections.abc import Sequence

from llmb.results.compare.baseline import MeasuredRun, repeated_times
from llmb.results.compare.median_interval import MedianInterval, ratio_of
from llmb.results.compare.speed_ratio import SpeedRatio, ratio_of_speeds
from llmb.results.request_bootstrap import FIGURES, RequestRatio


def repeat_ratios(a: Sequence[MeasuredRun], b: Sequence[MeasuredRun]) -> tuple[SpeedRatio | None, list[RequestRatio]]:
    """Return B over A: speed of training, or every figure of serving."""
    times_a, times_b = repeated_times(a), repeated_times(b)
    if "tokens_per_s" in times_a and "tokens_per_s" in times_b:
        return ratio_of_speeds(times_a["tokens_per_s"], times_b["tokens_per_s"], "tokens/s"), []
    shared = [figure for figure in times_a if figure in times_b]
    return None, [_ratio(figure, times_a[figure], times_b[figure]) for figure in shared]


def _ratio(figure: str, a: MedianInterval, b: MedianInterval) -> RequestRatio:
    higher_is_better = FIGURES[figure][1]  # then the time is that of a token
    value_a, value_b = (1 / a.median, 1 / b.median) if higher_is_better else (a.median, b.median)
    ratio = ratio_of(a, b) if higher_is_better else ratio_of(b, a)
    return RequestRatio(
        figure=figure, a=value_a, b=value_b, ratio=ratio.ratio, low=ratio.low, high=ratio.high,
        higher_is_better=higher_is_better,
    )  # fmt: skip
