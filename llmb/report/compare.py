"""Comparison of two runs: differing settings first, then the ratio of their speeds with an interval.

The ratio is the Hodges-Lehmann estimate: the median of all pairwise ratios of step times, with the distribution-free
interval that belongs to it (Mann-Whitney). It needs no normal distribution, and one slow step does not move it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.report.table import number, render
from llmb.results.result import Result

Z_95 = 1.96
# Fields that tell runs apart without making them different experiments.
IDENTITY = {"name", "overrides", "recipe_row", "reference", "environment", "workload.prediction"}

FIGURES = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "peak_memory_gib",
    "request_throughput",
    "output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
)


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """Ratio of the speeds of B and A; above 1 B is faster. The interval is None with too few samples."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def words(self) -> str:
        if self.low is None or self.high is None:
            return "no difference seen: too few samples to tell"
        if self.low > 1:
            return f"B is faster, by {100 * (self.ratio - 1):.1f} %"
        if self.high < 1:
            return f"B is slower, by {100 * (1 - self.ratio):.1f} %"
        return "no difference seen"


def speed_ratio(a: list[float], b: list[float]) -> SpeedRatio:
    """Return the time of A over the time of B from raw samples, with a 95 % interval."""
    if not a or not b or min(*a, *b) <= 0:
        raise ConfigError("nothing to compare: a run has no measured steps")
    pairs = sorted(x / y for x in a for y in b)
    middle = len(pairs) // 2
    median = pairs[middle] if len(pairs) % 2 else math.sqrt(pairs[middle - 1] * pairs[middle])
    spread = Z_95 * math.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
    outside = math.floor(len(pairs) / 2 - spread)
    if outside < 1:
        return SpeedRatio(ratio=median, low=None, high=None)
    return SpeedRatio(ratio=median, low=pairs[outside - 1], high=pairs[len(pairs) - outside])


def compare(
    a: tuple[RunConfig | None, Result],
    b: tuple[RunConfig | None, Result],
    force: bool = False,
    clusters: tuple[str | None, str | None] = (None, None),
) -> dict[str, Any]:
    """Return everything `llmb-run compare` prints, as plain data; `clusters`: where A and B were imported from."""
    (config_a, result_a), (config_b, result_b) = a, b
    for label, result in (("A", result_a), ("B", result_b)):
        if result.step_time_s is None and result.output_tokens_per_s is None:
            raise ConfigError(f"{label} ({result.name}) has no figures to compare: status {result.status}")
    if result_a.target != result_b.target and not force:
        raise ConfigError(
            f"different workloads: {result_a.target} and {result_b.target}; add --force to compare them all the same"
        )
    differing = dict(_differences(_flat(to_plain(config_a)), _flat(to_plain(config_b))))
    speed = None
    if result_a.step_time_s and result_b.step_time_s:
        speed = speed_ratio(list(result_a.step_time_s.samples), list(result_b.step_time_s.samples))
    return {
        "a": result_a.name,
        "b": result_b.name,
        "clusters": list(clusters),
        "differing": differing,
        "figures": list(_figures(result_a, result_b)),
        "speed": to_plain(speed),
        "verdict": speed.words if speed else "only single figures, no samples: no verdict",
    }


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
    step = [r.step_time_s.median if r.step_time_s else None for r in (a, b)]
    for name, pair in [("step_time_s", step), *((n, [getattr(a, n), getattr(b, n)]) for n in FIGURES)]:
        if pair[0] and pair[1] is not None:
            yield {"figure": name, "a": pair[0], "b": pair[1], "ratio": pair[1] / pair[0]}


def text(compared: dict[str, Any]) -> str:
    """Format a comparison: differing fields first, then figures, then the verdict."""
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
    if speed and speed["low"] is not None:
        interval = f"{number(speed['low'])} to {number(speed['high'])}"
        parts.append(f"speed of B over A: {number(speed['ratio'])} (95 % interval {interval})")
    parts.append(f"verdict: {compared['verdict']}")
    return "\n\n".join(parts)
