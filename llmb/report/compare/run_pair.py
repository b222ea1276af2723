"""Comparison of two runs: differing settings, figures, the ratio of their speeds with an interval, and a verdict.

The speed of training is tokens over time, whatever the batch; that of serving is output tokens over time. The ratio is
that of the medians, which the figures print too. Its interval accounts for the correlation of neighbouring steps
(`llmb/results/compare/median_interval.py`). The intervals of serving come from its requests
(`llmb/results/request_bootstrap.py`); totals of another engine have none. Whatever keeps the ratio from answering the
question stands in the verdict.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.samples.timed_requests import TimedRequest
from llmb.report.compare.clock_doubts import median_clock
from llmb.report.compare.compare_doubts import doubts
from llmb.report.compare.compare_serving import serving_verdict
from llmb.results.compare.baseline import MeasuredRun
from llmb.results.compare.differing_settings import differing_fields
from llmb.results.compare.repeat_ratios import repeat_ratios
from llmb.results.compare.speed_ratio import SpeedRatio, speed_ratio, tokens_per_step
from llmb.results.request_bootstrap import RequestRatio, request_ratios
from llmb.results.result import Result

FIGURES = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "peak_memory_gib",
    "request_throughput",
    "output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
    "steady_output_tokens_per_s",
    "output_tokens_per_s_per_user",
    "goodput_requests_per_s",
    "goodput_tokens_per_s",
    "slo_fraction",
    "mean_power_w",
    "joules_per_token",
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")  # distributions
STATISTICS = ("mean", "p50", "p99")

Run = tuple[RunConfig | None, Result]


def compare(
    a: Run,
    b: Run,
    force: bool = False,
    clusters: tuple[str | None, str | None] = (None, None),
    requests: tuple[Sequence[TimedRequest], Sequence[TimedRequest]] = ((), ()),
    labels: tuple[str, str] = ("A", "B"),
    repeats: tuple[Sequence[MeasuredRun], Sequence[MeasuredRun]] = ((), ()),
) -> dict[str, Any]:
    """Return everything `llmb-run compare` prints of two runs, as plain data.

    `clusters`: where A and B were imported from; `requests`: measured and successful, of serving runs; `repeats`: more
    runs of the same configurations, which add the noise between runs to the intervals.
    """
    (config_a, result_a), (config_b, result_b) = a, b
    for label, result in zip(labels, (result_a, result_b), strict=True):
        if result.step_time_s is None and result.output_tokens_per_s is None:
            raise ConfigError(f"{label} ({result.name}) has no figures to compare: status {result.status}")
    if result_a.target != result_b.target and not force:
        raise ConfigError(
            f"different workloads: {result_a.target} and {result_b.target}; "
            "--force compares them anyway (in Python: force=True)"
        )
    ratios = [] if any(repeats) else request_ratios(*requests)
    speed = None if any(repeats) else _speed(a, b, ratios)
    if any(repeats) and config_a is not None and config_b is not None:
        speed, ratios = repeat_ratios(
            [(config_a, result_a, requests[0]), *repeats[0]], [(config_b, result_b, requests[1]), *repeats[1]]
        )
        speed = speed or _speed(a, b, ratios)
    return {
        "a": result_a.name,
        "b": result_b.name,
        "labels": list(labels),
        "runs": [1 + len(more) for more in repeats],
        "clusters": list(clusters),
        "differing": differing_fields([config_a, config_b]),
        "figures": list(_figures([a, *_runs(repeats[0])], [b, *_runs(repeats[1])])),
        "step_tokens": [tokens_per_step(*a), tokens_per_step(*b)],
        "speed": to_plain(speed),
        "requests": [to_plain(ratio) for ratio in ratios],
        "verdict": serving_verdict(ratios, labels[1]) if ratios else _conclusion(speed, labels[1]),
        "doubts": list(doubts(a, b, labels)) if speed else [],
    }


def _speed(a: Run, b: Run, ratios: Sequence[RequestRatio]) -> SpeedRatio | None:
    """Return the ratio in tokens/s, steps/s where tokens are unknown, or output tokens/s; None: no shared figure."""
    steps_a, steps_b = a[1].step_time_s, b[1].step_time_s
    if steps_a and steps_b:
        tokens_a, tokens_b = tokens_per_step(*a), tokens_per_step(*b)
        if tokens_a is None or tokens_b is None:
            return speed_ratio(steps_a.samples, steps_b.samples)
        times_a = [seconds / tokens_a for seconds in steps_a.samples]
        return speed_ratio(times_a, [seconds / tokens_b for seconds in steps_b.samples], "tokens/s")
    if ratios:
        return SpeedRatio(ratio=ratios[0].ratio, low=ratios[0].low, high=ratios[0].high, unit="output tokens/s")
    rate_a, rate_b = a[1].output_tokens_per_s, b[1].output_tokens_per_s
    if rate_a and rate_b:
        return SpeedRatio(ratio=rate_b / rate_a, low=None, high=None, unit="output tokens/s")
    return None


def _conclusion(speed: SpeedRatio | None, label: str) -> str:
    if speed is None:
        return "none: the runs share no figure of speed"
    if speed.unit != "output tokens/s":
        return speed.words(label)
    change = f"{100 * abs(speed.ratio - 1):.1f} % {'more' if speed.ratio > 1 else 'fewer'}"
    advice = "a run has one figure and no interval: repeat each (-r 5) to see the noise"
    return f"{label} generates {change} {speed.unit}; {advice}"


def figures_of(config: RunConfig | None, result: Result) -> dict[str, float | None]:
    """Return the figures of a run by name; training has its time per token and per sample (sequence) too."""
    step = result.step_time_s.median if result.step_time_s else None
    tokens, seqlen = tokens_per_step(config, result), getattr(config.workload if config else None, "seqlen", None)
    per_token = step / tokens if step and tokens else None
    return {
        "step_time_s": step,
        "time_per_token_us": None if per_token is None else 1e6 * per_token,
        "time_per_sample_ms": None if per_token is None or seqlen is None else 1e3 * per_token * seqlen,
        **{name: getattr(result, name) for name in FIGURES},
        "sm_clock_mhz (p50)": median_clock(result),
        **{
            f"{name} ({statistic})": (getattr(result, name) or {}).get(statistic)
            for name in LATENCIES
            for statistic in STATISTICS
        },
    }


def mean_figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """Return the figures of repeats, each the mean over them; None where one lacks it."""
    each = [figures_of(*run) for run in runs]
    means: dict[str, float | None] = {}
    for name in each[0]:
        values = [value for figures in each if (value := figures[name]) is not None]
        means[name] = fmean(values) if len(values) == len(each) else None
    return means


def _runs(repeats: Sequence[MeasuredRun]) -> list[Run]:
    return [(config, result) for config, result, _ in repeats]


def _figures(a: Sequence[Run], b: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield each figure both sides have; the ratio is B over A, whatever its direction."""
    values_a, values_b = mean_figures(a), mean_figures(b)
    same_step = same_size(tokens_per_step(*a[0]), tokens_per_step(*b[0]))
    for name, value_a in values_a.items():
        value_b = values_b[name]
        if value_a and value_b is not None:
            ratio = None if name == "step_time_s" and not same_step else value_b / value_a
            yield {"figure": name, "a": value_a, "b": value_b, "ratio": ratio}


def same_size(tokens_a: float | None, tokens_b: float | None) -> bool:
    """Return whether steps have the same tokens, as far as is known: only then their times have a ratio."""
    return tokens_a is None or tokens_b is None or abs(tokens_a - tokens_b) < 0.5
