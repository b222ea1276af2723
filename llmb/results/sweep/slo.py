"""Service-level objectives (SLOs) of a sweep: limits on statistics of latencies, and whether a load holds them.

    parse_slo("ttft=500ms,tpot.p50=50ms")  -> (SloLimit(figure="ttft_ms", statistic="p99", limit=500.0), ...)
    broken_limits(figures, limits)         -> ("ttft p99 612 ms > 500 ms",)    empty: the load holds all of them

A limit without a statistic is one on p99. A load of which a request failed, or whose figure is unknown, does not hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmb.config.load_settings import SLO_EXAMPLE, parse_latency_limits
from llmb.errors import ConfigError, UnknownName

FIGURES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2e": "e2e_ms"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
DEFAULT_STATISTIC = "p99"


@dataclass(frozen=True, kw_only=True)
class SloLimit:
    """Highest value of a statistic of a latency, in ms."""

    figure: str  # field of Result
    statistic: str
    limit: float

    @property
    def name(self) -> str:
        return f"{self.figure.removesuffix('_ms')} {self.statistic}"

    def __str__(self) -> str:
        return f"{self.name} <= {self.limit:g} ms"


def parse_slo(text: str, option: str = "--slo") -> tuple[SloLimit, ...]:
    """Return the limits of one tier."""
    limits = tuple(_limit(name, limit, option) for name, limit in parse_latency_limits(text, option).items())
    names = [limit.name for limit in limits]
    if twice := [name for name in names if names.count(name) > 1]:  # ttft and ttft.p99
        raise ConfigError(f"{option}: {twice[0]} has two limits")
    return limits


def parse_tiers(tiers: Any, source: str) -> dict[str, tuple[SloLimit, ...]]:
    """Return the limits by tier, from the content of a YAML file: name -> limits as a mapping or as text."""
    if not isinstance(tiers, Mapping) or not tiers:
        raise ConfigError(f"{source}: expected tiers such as 'interactive: {{ttft: 500ms, tpot: 30ms}}'")
    parsed = {}
    for name, limits in tiers.items():
        if isinstance(limits, Mapping):
            limits = ",".join(f"{figure}={value}" for figure, value in limits.items())
        if not isinstance(limits, str):
            raise ConfigError(f"{source}: tier {name}: expected limits; {SLO_EXAMPLE}")
        parsed[str(name)] = parse_slo(limits, f"{source}: tier {name}")
    return parsed


def _limit(name: str, limit_ms: float, option: str) -> SloLimit:
    short, dot, statistic = name.partition(".")
    if short not in FIGURES:
        raise UnknownName(f"latency ({option})", short, FIGURES)
    if dot and statistic not in STATISTICS:
        raise UnknownName(f"statistic ({option})", statistic, STATISTICS)
    return SloLimit(figure=FIGURES[short], statistic=statistic or DEFAULT_STATISTIC, limit=limit_ms)


def broken_limits(figures: Any, limits: tuple[SloLimit, ...]) -> tuple[str, ...]:
    """Return why a load does not hold; `figures` has the fields of a Result."""
    broken = []
    if figures.requests_failed:
        broken.append(f"{figures.requests_failed} requests failed")
    for limit in limits:
        value = (getattr(figures, limit.figure) or {}).get(limit.statistic)
        if value is None:
            broken.append(f"{limit.name} is unknown")
        elif value > limit.limit:
            broken.append(f"{limit.name} {value:.4g} ms > {limit.limit:g} ms")
    return tuple(broken)
