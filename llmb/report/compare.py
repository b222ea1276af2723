"""Comparison of two runs: differing settings first, then the ratio of their speeds with an interval, then a verdict.

The speed of training is tokens over time, whatever the batch; that of serving is output tokens over time. The ratio is
that of the medians, which the figures above it print too, with Price and Bonett's distribution-free interval for a
ratio of medians (2002): it needs no normal distribution, and one slow step does not move it. The intervals of serving
come from its requests (`llmb/results/request_bootstrap.py`); totals of another engine have none. Whatever keeps the
ratio from answering the question stands in the verdict.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.metrics import TimedRequest
from llmb.report.compare_doubts import doubts, tokens_per_step
from llmb.report.compare_serving import METHOD, serving_verdict
from llmb.report.table import number, render
from llmb.results.request_bootstrap import RequestRatio, request_ratios
from llmb.results.result import Result

Z_95 = 1.96
FEWEST_SAMPLES = 5  # of a run, for an interval
# Fields that tell runs apart without making them different experiments.
IDENTITY = {"name", "overrides", "recipe_row", "reference", "environment", "predicted", "workload.prediction"}

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
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")  # distributions
STATISTICS = ("mean", "p50", "p99")


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """Ratio of the speeds of B and A; above 1 B is faster. The interval is None with too few samples."""

    ratio: float
    low: float | None
    high: float | None
    unit: str  # of the speeds

    @property
    def words(self) -> str:
        percent = f"by {100 * abs(self.ratio - 1):.1f} % in {self.unit}"
        if self.low is None or self.high is None:
            direction = "faster" if self.ratio > 1 else "slower"
            return f"too few samples to tell; B looks {direction}, {percent}"
        if self.low > 1:
            return f"B is faster, {percent}"
        if self.high < 1:
            return f"B is slower, {percent}"
        return f"no difference seen in {self.unit}"


def speed_ratio(a: list[float], b: list[float], unit: str = "steps/s") -> SpeedRatio:
    """Return the speed of B over that of A from samples of their times, with a 95 % interval."""
    if not a or not b or min(*a, *b) <= 0:
        raise ConfigError("nothing to compare: a run has no measured steps")
    ratio = median(a) / median(b)
    if min(len(a), len(b)) < FEWEST_SAMPLES:
        return SpeedRatio(ratio=ratio, low=None, high=None, unit=unit)
    factor = math.exp(Z_95 * math.sqrt(_log_median_variance(a) + _log_median_variance(b)))
    return SpeedRatio(ratio=ratio, low=ratio / factor, high=ratio * factor, unit=unit)


def _log_median_variance(samples: list[float]) -> float:
    """Return the variance of the logarithm of the median, from two order statistics around it."""
    ordered, n = sorted(samples), len(samples)
    rank = max(1, round((n + 1) / 2 - math.sqrt(n)))
    outside = sum(math.comb(n, i) for i in range(rank)) * 0.5 ** (n - 1)  # probability that they miss the true median
    width = math.log(ordered[n - rank] / ordered[rank - 1])
    return float((width / (2 * NormalDist().inv_cdf(1 - outside / 2))) ** 2)


def compare(
    a: tuple[RunConfig | None, Result],
    b: tuple[RunConfig | None, Result],
    force: bool = False,
    clusters: tuple[str | None, str | None] = (None, None),
    requests: tuple[Sequence[TimedRequest], Sequence[TimedRequest]] = ((), ()),
) -> dict[str, Any]:
    """Return everything `llmb-run compare` prints, as plain data.

    `clusters`: where A and B were imported from; `requests`: measured and successful, of serving runs.
    """
    (config_a, result_a), (config_b, result_b) = a, b
    for label, result in (("A", result_a), ("B", result_b)):
        if result.step_time_s is None and result.output_tokens_per_s is None:
            raise ConfigError(f"{label} ({result.name}) has no figures to compare: status {result.status}")
    if result_a.target != result_b.target and not force:
        raise ConfigError(
            f"different workloads: {result_a.target} and {result_b.target}; add --force to compare them all the same"
        )
    ratios = request_ratios(*requests)
    speed = _speed(a, b, ratios)
    return {
        "a": result_a.name,
        "b": result_b.name,
        "clusters": list(clusters),
        "differing": dict(_differences(_flat(to_plain(config_a)), _flat(to_plain(config_b)))),
        "figures": list(_figures(result_a, result_b)),
        "step_tokens": [tokens_per_step(*a), tokens_per_step(*b)],
        "speed": to_plain(speed),
        "requests": [to_plain(ratio) for ratio in ratios],
        "verdict": serving_verdict(ratios) if ratios else _conclusion(speed),
        "doubts": list(doubts(a, b)) if speed else [],
    }


def _speed(
    a: tuple[RunConfig | None, Result], b: tuple[RunConfig | None, Result], ratios: Sequence[RequestRatio]
) -> SpeedRatio | None:
    """Return the ratio in tokens/s, steps/s where tokens are unknown, or output tokens/s; None: no shared figure."""
    steps_a, steps_b = a[1].step_time_s, b[1].step_time_s
    if steps_a and steps_b:
        tokens_a, tokens_b = tokens_per_step(*a), tokens_per_step(*b)
        if tokens_a is None or tokens_b is None:
            return speed_ratio(list(steps_a.samples), list(steps_b.samples))
        times_a = [seconds / tokens_a for seconds in steps_a.samples]
        return speed_ratio(times_a, [seconds / tokens_b for seconds in steps_b.samples], "tokens/s")
    if ratios:
        return SpeedRatio(ratio=ratios[0].ratio, low=ratios[0].low, high=ratios[0].high, unit="output tokens/s")
    rate_a, rate_b = a[1].output_tokens_per_s, b[1].output_tokens_per_s
    if rate_a and rate_b:
        return SpeedRatio(ratio=rate_b / rate_a, low=None, high=None, unit="output tokens/s")
    return None


def _conclusion(speed: SpeedRatio | None) -> str:
    if speed is None:
        return "none: the runs share no figure of speed"
    if speed.unit != "output tokens/s":
        return speed.words
    change = f"{100 * abs(speed.ratio - 1):.1f} % {'more' if speed.ratio > 1 else 'fewer'}"
    return (
        f"B generates {change} {speed.unit}; a run has one figure and no interval: repeat each (-r 5) to see the noise"
    )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else key
        if path not in IDENTITY:
            flat |= _flat(item, path)
    return flat


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            yield key, [a.get(key), b.get(key)]


def _figures(a: Result, b: Result) -> Iterator[dict[str, Any]]:
    """Yield each figure both runs have; the ratio is B over A, whatever its direction."""
    pairs: dict[str, list[float | None]] = {
        "step_time_s": [r.step_time_s.median if r.step_time_s else None for r in (a, b)],
        **{name: [getattr(a, name), getattr(b, name)] for name in FIGURES},
        **{
            f"{name} ({statistic})": [(getattr(r, name) or {}).get(statistic) for r in (a, b)]
            for name in LATENCIES
            for statistic in STATISTICS
        },
    }
    for name, (value_a, value_b) in pairs.items():
        if value_a and value_b is not None:
            yield {"figure": name, "a": value_a, "b": value_b, "ratio": value_b / value_a}


def text(compared: dict[str, Any]) -> str:
    """Format a comparison: differing fields first, then figures, then the verdict and what speaks against it."""
    from_where = [f" (imported from {cluster})" if cluster else "" for cluster in compared["clusters"]]
    parts = [f"A: {compared['a']}{from_where[0]}\nB: {compared['b']}{from_where[1]}"]
    if compared["differing"]:
        rows = [(field, *values) for field, values in compared["differing"].items()]
        parts.append("differing fields\n" + render(("field", "A", "B"), rows))
    else:
        parts.append("same configuration")
    rows = [(f["figure"], f["a"], f["b"], f["ratio"]) for f in compared["figures"]]
    parts.append(render(("figure", "A", "B", "B/A"), rows))
    speed = compared["speed"]
    if compared["requests"]:
        rows = [(r["figure"], r["ratio"], r["low"], r["high"]) for r in compared["requests"]]
        parts.append(f"{METHOD}\n{render(('B/A of', 'ratio', 'from', 'to'), rows)}")
    elif speed and speed["low"] is not None:
        interval = f"{number(speed['low'])} to {number(speed['high'])}"
        larger = _step_size(*compared["step_tokens"])
        parts.append(f"{speed['unit']} of B over A: {number(speed['ratio'])} (95 % interval {interval}){larger}")
    verdict = f"verdict: {compared['verdict']}"
    if compared["doubts"]:
        verdict += "; but\n" + "\n".join(f"- {doubt}" for doubt in compared["doubts"])
    parts.append(verdict)
    return "\n\n".join(parts)


def _step_size(tokens_a: float | None, tokens_b: float | None) -> str:
    """Return the clause that explains why the ratio of step times is another one."""
    if tokens_a is None or tokens_b is None or abs(tokens_a - tokens_b) < 0.5:
        return ""
    return f"; step_time_s differs from it: a step of B has {number(tokens_b / tokens_a)} x the tokens of A's"
