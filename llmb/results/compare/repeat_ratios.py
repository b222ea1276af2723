"""Ratios of two configurations that ran several times each, with intervals that hold the noise between runs.

repeat_ratios(runs_a, runs_b) -> (SpeedRatio(ratio=1.02, low=1.01, ...), [])      training
repeat_ratios(runs_a, runs_b) -> (None, [RequestRatio(figure="ttft_ms", ...)])    serving
"""

from collections.abc import Sequence

from llmb.results.compare.baseline import MeasuredRun, repeated_times
from llmb.results.compare.speed_ratio import SpeedRatio, ratio_of_speeds
from llmb.results.request_bootstrap import RequestRatio, ratios_of_times


def repeat_ratios(a: Sequence[MeasuredRun], b: Sequence[MeasuredRun]) -> tuple[SpeedRatio | None, list[RequestRatio]]:
    """Return B over A: speed of training, or every figure of serving."""
    times_a, times_b = repeated_times(a), repeated_times(b)
    if "tokens_per_s" in times_a and "tokens_per_s" in times_b:
        return ratio_of_speeds(times_a["tokens_per_s"], times_b["tokens_per_s"], "tokens/s"), []
    return None, ratios_of_times(times_a, times_b)
