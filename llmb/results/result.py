"""Result of one run: derived from config and events, stored as result.json, printed as stored.

Every field carries its unit in its name. Null means not known or not applicable, never zero.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from llmb.config.spec import Status
from llmb.perfmodel.metrics import Statistics
from llmb.results.goodput.goodput_result import Goodput


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured value beside an expected one; `ratio` above 1 means faster than expected."""

    metric: str
    value: float
    measured: float
    ratio: float
    source: str


@dataclass(frozen=True, kw_only=True)
class PredictionCheck(Comparison):
    """A measured value beside the predicted one."""

    interval_80: tuple[float, float] | None = None  # of the prediction; null: not known
    likely_reason: str | None = None  # why the measured value is outside of it; null: it is not


@dataclass(frozen=True, kw_only=True)
class MeasuredCeiling:
    """Rates that `llmb-run probe` measured on the same machine: known of a GPU without published peaks, too."""

    tflops: float  # sustained GEMMs
    dtype: str  # of these GEMMs
    fraction: float | None  # of them that the run reached, by its model FLOPs; null: not known, as of serving
    memory_gbs: float
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
    """Time of one kind of work in a profiled step."""

    kind: str
    seconds_per_step: float
    share: float  # of the step, 0 to 1


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that the others waited for, over the measured window."""

    rank: int
    host: str | None
    own_s: float  # busy time of a step, waiting excluded; median
    usual_s: float  # the same of the median of the others
    ratio: float  # of these two; above 1 is slower


@dataclass(frozen=True, kw_only=True)
class OneRankStep:
    """Step of one rank that ran alone: its measured compute, and the modelled time of what it did not do."""

    rank: int
    ranks: int  # of the layout, on as many GPUs of type `Result.gpu`
    layout: str  # tp8 pp8 cp2 dp8
    pipeline_rank: int
    machine: str  # type of the GPU that it ran on
    measured_s: float  # of a step: compute, copies in place of collectives, optimizer; median
    tflops: float  # FLOP/s that this rank computes, recomputation included, in the measured time
    communication_s: dict[str, float] | None  # modelled, not hidden behind compute, by kind; null: no model of the GPU
    bubble_s: float  # modelled: waiting for other pipeline stages
    step_time_s: float | None  # the sum of all three: not a measurement
    reference: Comparison | None = None  # of that sum, with the published step time of all ranks


@dataclass(frozen=True, kw_only=True)
class GpuTelemetry:
    """Samples of all GPUs over the measured interval, twice a second each. Null: the driver does not say."""

    samples: int
    gpus: int  # that were sampled
    power_w: dict[str, float] | None  # mean, p5, p50, p95; this and the next ones of one GPU
    power_limit_w: float | None  # enforced; the lowest
    sm_clock_mhz: dict[str, float] | None
    temperature_c: dict[str, float] | None
    throttled_fraction: float  # of samples, in which something kept clocks down, 0 to 1
    throttle_reasons: dict[str, float]  # the same by reason; several may act at once
    sampling_cpu_fraction: float | None  # of one core, that sampling took


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding of a run: its draft model, what was accepted, and the speed-up of a request's decoding."""

    draft: str
    tokens: int  # drafts of a step
    acceptance_forced: bool  # by stated probabilities: the text is not what the model would say
    stated_acceptance: tuple[float, ...] | None  # this and the next: by position, of drafts whose predecessors stand
    acceptance: tuple[float | None, ...]  # measured; null: none was compared
    tokens_per_step: float  # that a verification emits, mean
    plain_tpot_ms: float | None  # of one batch of requests without drafts, before the measured phase; mean
    drafted_tpot_ms: float | None  # of the same requests with drafts
    speedup: float | None  # the ratio of these two
    modelled_speedup: float | None  # of a decode step at the measured acceptance; null: `modelled_note` says why
    modelled_note: str | None = None


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
    one_rank: OneRankStep | None = None  # of a run of one rank only; rates of the cluster are then null
    number_formats: dict[str, Any] = field(default_factory=dict)  # dtype, fp8 recipe, master weights, gradients, ...
    status: Status
    reason: str | None = None
    failed_rank: int | None = None  # the rank that caused the failure; null: none, or unknown
    last_lines: tuple[str, ...] = ()  # of that rank's output

    step_time_s: Statistics | None = None  # over the measured window
    window: tuple[int, int] | None = None  # its first and last step
    steps_done: int | None = None
    steps_asked: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    tflops_source: Literal["model FLOPs", "reported by the engine"] | None = None
    mfu: float | None = None  # fraction of the peak, 0 to 1
    mfu_peak_tflops: float | None = None
    mfu_peak_dtype: str | None = None
    mfu_convention: str | None = None
    hfu: float | None = None
    measured_ceiling: MeasuredCeiling | None = None  # null: `probe` has not measured the machine in this dtype
    days_per_1t_tokens: float | None = None
    peak_memory_gib: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    slow_ranks: tuple[SlowRank, ...] = ()
    goodput: Goodput | None = None  # of training that restarts after failures, injected or real

    requests: int | None = None  # measured and finished
    requests_failed: int | None = None
    warmup_requests: int | None = None  # before them, left out everywhere
    warmup_s: float | None = None
    lengths_wrong: int | None = None  # outputs of another length than requested; null where EOS may end them
    input_tokens: int | None = None
    output_tokens: int | None = None
    duration_s: float | None = None  # the whole run: last end - first arrival
    request_throughput: float | None = None  # requests/s
    output_tokens_per_s: float | None = None  # over the whole run, ramp-up and drain included
    output_tokens_per_s_per_gpu: float | None = None
    output_tokens_per_s_per_user: float | None = None  # n / E2E, mean over requests
    output_speed_tokens_per_s: float | None = None  # after the first token, mean over requests
    output_speed_summary_tokens_per_s: dict[str, float] | None = None  # mean, p50, p90, p95, p99; high is fast
    total_tokens_per_s: float | None = None  # input and output
    steady_output_tokens_per_s: float | None = None  # over the window in which the engine is full
    steady_window_s: tuple[float, float] | None = None  # its start and end, since the benchmark began
    mean_concurrency: float | None = None  # requests
    issue_rate_requests_per_s: float | None = None  # null when all came at once
    ttft_ms: dict[str, float] | None = None  # mean, p25, p50, p75, p90, p95, p99; from when a request was sent
    tpot_ms: dict[str, float] | None = None
    itl_ms: dict[str, float] | None = None
    e2e_ms: dict[str, float] | None = None
    ttft_scheduled_ms: dict[str, float] | None = None  # the same from when a request was due; null: it had no time
    e2e_scheduled_ms: dict[str, float] | None = None
    first_byte_ms: dict[str, float] | None = None  # of the HTTP response, from when a request was sent
    output_tokens_per_s_per_user_scheduled: float | None = None  # n / E2E from when a request was due, mean
    latency_intervals_ms: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)  # 95 %, over requests
    errors: dict[str, int] = field(default_factory=dict)  # failed requests by kind
    slo: dict[str, float] | None = None  # limits of the service-level objective
    slo_fraction: float | None = None  # of all requests, that hold every limit
    goodput_requests_per_s: float | None = None  # of those, over the whole run
    goodput_tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None  # of input tokens, read from the prefix cache, 0 to 1
    prefix_hit_source: str | None = None
    prefix_hit_rate_possible: float | None = None  # with an unlimited cache, for these requests
    tokens_counted_by: str | None = None  # usage (the server), tokenizer, chunks, nobody; null: the engine
    token_counts_wrong: int | None = None  # outputs that the client's tokenizer counts otherwise
    tokens_per_chunk: float | None = None  # of a stream, mean
    cost_per_million_output_tokens: float | None = None  # in the currency of --gpu-cost-per-hour
    cost_per_million_tokens: float | None = None  # input and output
    joules_per_million_output_tokens: float | None = None
    client: dict[str, Any] | None = None  # of the load generator: its cost and lateness, fields of ClientFacts
    kv_cache_gib: float | None = None  # of one GPU
    kv_peak_use: float | None = None  # fraction of its blocks, 0 to 1
    weights_gib: float | None = None  # of one GPU
    weights_note: str | None = None  # how they are held, if not as requested
    speculation: Speculation | None = None  # null: no speculative decoding
    energy_joules: float | None = None  # of all GPUs over the measured interval
    energy_valid: bool | None = None  # counters and sampled power agree; null: only one of them is known
    energy_note: str | None = None  # why there is none
    output_tokens_per_joule: float | None = None
    mean_power_w: float | None = None  # of one GPU
    joules_per_token: float | None = None  # of training: power of GPUs alone over their tokens/s
    telemetry: GpuTelemetry | None = None  # power, clocks, temperature, throttling; null without a GPU

    time_spent: tuple[TimeShare, ...] = ()  # of a profiled run; the shares sum to 1
    collectives: tuple[Collective, ...] = ()
    reference: Comparison | None = None
    predicted: PredictionCheck | None = None
    warnings: tuple[Caution, ...] = ()
    log_problems: dict[str, int] = field(default_factory=dict)

    started: float | None = None  # seconds since 1970
    gpu_name: str | None = None
    host: str | None = None
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)  # of rank 0: power limit, clocks, driver; not the unknown ones
    fallbacks: tuple[str, ...] = ()  # what the device lacks and what ran instead, a line each
    overrides: tuple[dict[str, Any], ...] = ()
