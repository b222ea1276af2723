"""The Result: what one run achieved. Derived from config and events, stored as result.json, printed as it is stored.

Every field carries its unit in its name. Null means not known or not applicable, never zero.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from llmb.metrics import Statistics
from llmb.spec import Status


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured value beside an expected one; `ratio` above 1 means faster than expected."""

    metric: str
    value: float
    measured: float
    ratio: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Caution:
    """One warning of the closed list in warnings.py, with what to do about it."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All calls of one kind in a communication trace."""

    operation: str
    calls: int
    bytes: int | None
    datatype: str
    ranks: int | None


@dataclass(frozen=True, kw_only=True)
class TimeShare:
    """What one kind of work took of a profiled step."""

    kind: str
    seconds_per_step: float
    share: float  # of the step, 0 to 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run in figures."""

    schema: int = 1
    name: str
    target: str | None = None
    size: str | None = None
    dtype: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    engine: str | None = None  # null: a log does not say for sure
    proxy: str | None = None
    status: Status
    reason: str | None = None
    guilty_rank: int | None = None  # whose fault it was; null: no rank's, or not known
    last_lines: tuple[str, ...] = ()  # of that rank's output

    step_time_s: Statistics | None = None  # over the measured window
    window: tuple[int, int] | None = None  # its first and last step
    steps_done: int | None = None
    steps_asked: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    tflops_source: Literal["model FLOPs", "reported by the engine"] | None = None
    mfu: float | None = None  # share of the peak, 0 to 1
    mfu_peak_tflops: float | None = None
    mfu_peak_dtype: str | None = None
    mfu_convention: str | None = None
    hfu: float | None = None
    days_per_1t_tokens: float | None = None
    peak_memory_gib: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None

    requests: int | None = None
    requests_failed: int | None = None
    duration_s: float | None = None
    request_throughput: float | None = None  # requests/s
    output_tokens_per_s: float | None = None
    output_tokens_per_s_per_gpu: float | None = None
    output_tokens_per_s_per_user: float | None = None
    output_speed_tokens_per_s: float | None = None  # after the first token, mean over requests
    total_tokens_per_s: float | None = None
    ttft_ms: dict[str, float] | None = None  # mean, p50, p90, p95, p99
    tpot_ms: dict[str, float] | None = None
    itl_ms: dict[str, float] | None = None
    e2e_ms: dict[str, float] | None = None

    time_spent: tuple[TimeShare, ...] = ()  # of a profiled run; the shares sum to 1
    collectives: tuple[Collective, ...] = ()
    reference: Comparison | None = None
    predicted: Comparison | None = None
    warnings: tuple[Caution, ...] = ()
    log_problems: dict[str, int] = field(default_factory=dict)

    started: float | None = None  # seconds since 1970
    gpu_name: str | None = None
    host: str | None = None
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    overrides: tuple[dict[str, Any], ...] = ()
