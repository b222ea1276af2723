"""Ratio of the speeds of two runs with a 95 % interval, from the times of their steps per token.

speed_ratio(seconds_per_token_a, seconds_per_token_b, "tokens/s") -> SpeedRatio(ratio=1.026, low=1.02, ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmb.config.lr_schedule import configured_tokens_per_step
from llmb.config.spec import OutOfCore, RunConfig, Training
from llmb.results.compare.median_interval import MedianInterval, median_interval, ratio_of
from llmb.results.result import Result


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """Ratio of the speeds of B and A; above 1 B is faster. The interval is None with too few samples."""

    ratio: float
    low: float | None
    high: float | None
    unit: str  # of the speeds
    times: tuple[MedianInterval, MedianInterval] | None = None  # of A and B: seconds per unit; none: only totals

    @property
    def differs(self) -> bool | None:
        """True if the interval excludes 1; None without an interval."""
        return None if self.low is None or self.high is None else self.low > 1 or self.high < 1

    def words(self, label: str = "B") -> str:
        """Return the verdict on this run against the baseline."""
        percent = f"by {100 * abs(self.ratio - 1):.1f} % in {self.unit}"
        direction = "faster" if self.ratio > 1 else "slower"
        if self.differs is None:
            return f"too few samples to tell; {label} looks {direction}, {percent}"
        if self.differs:
            return f"{label} is {direction}, {percent}"
        return f"no difference seen in {self.unit}"


def speed_ratio(a: Sequence[float], b: Sequence[float], unit: str = "steps/s") -> SpeedRatio:
    """Return the speed of B over that of A from samples of their times, in the order they were measured."""
    return ratio_of_speeds(median_interval(a), median_interval(b), unit)


def ratio_of_speeds(a: MedianInterval, b: MedianInterval, unit: str) -> SpeedRatio:
    """Return the speed of B over that of A from intervals of their median times."""
    times = ratio_of(a, b)
    return SpeedRatio(ratio=times.ratio, low=times.low, high=times.high, unit=unit, times=(a, b))


def tokens_per_step(config: RunConfig | None, result: Result) -> float | None:
    """Return the tokens of an optimizer step, as recorded or else as configured."""
    if result.tokens_per_s is not None and result.step_time_s is not None:
        return result.tokens_per_s * result.step_time_s.median
    work = config.workload if config is not None else None
    if isinstance(work, Training) or (isinstance(work, OutOfCore) and work.plan is not None):
        return configured_tokens_per_step(work)
    return None


def time_per_token(config: RunConfig | None, result: Result) -> float | None:
    """Return seconds per token of training, or per output token of serving; None: neither is known."""
    tokens = tokens_per_step(config, result)
    if result.step_time_s is not None and tokens:
        return result.step_time_s.median / tokens
    return 1 / result.output_tokens_per_s if result.output_tokens_per_s else None
