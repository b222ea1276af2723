"""Report of an inference run in the layout of trtllm-bench, readable by tools that parse its logs.

    print(overview(result, config))

Same labels, columns, order and formulas; `llmb/results/readers/trtllm_log.py` reads the figures back. Two differ: the
issue rate is requests over seconds, and percentiles interpolate. Unknown figures are left out, as are the streaming
lines without streaming. What the original does not print follows in a block of its own. A failed run has no report:
its figures could be mistaken for good ones.
"""

from collections.abc import Iterable

from llmb.config.spec import Inference, RunConfig
from llmb.results.result import Result

RULE = "=" * 59
LABEL, DETAIL, SETTING = 50, 32, 24  # columns at which values begin
ROUNDING = 1e-4  # of a value, that its printed form may leave out
STATISTICS = {"mean": "AVERAGE", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99"}

Line = tuple[str, float | str | None]


def overview(result: Result, config: RunConfig) -> str:
    """Return the whole report, or an empty string."""
    if not isinstance(config.workload, Inference) or result.status != "ok" or not result.request_throughput:
        return ""
    streamed = _streamed(result) if config.workload.streaming else []
    parts = [
        _block("REQUEST DETAILS", _details(result), DETAIL),
        _block("WORLD + RUNTIME INFORMATION", _settings(result, config, config.workload), SETTING),
        "",
        _block("PERFORMANCE OVERVIEW", [*_totals(result), *streamed], LABEL),
        *_breakdowns(result, config.workload.streaming),
        "",
        _block("STEADY STATE, LENGTHS, MEMORY, ENERGY", _extra_lines(result, config.workload), LABEL),
    ]
    return "\n".join([*parts, RULE])


def _block(title: str, lines: Iterable[Line], column: int) -> str:
    rows = (f"{label + ':':<{column - 1}} {_value(value)}" for label, value in lines if value is not None)
    return "\n".join([RULE, f"= {title}", RULE, *rows])


def _value(value: float | str) -> str:
    """Format with four decimals as the original, or six digits where four decimals lose precision."""
    if isinstance(value, str | int):
        return str(value)
    four = f"{value:.4f}"
    return four if abs(float(four) - value) <= ROUNDING * abs(value) else f"{value:.6g}"


def _details(result: Result) -> list[Line]:
    return [
        ("Number of requests", result.requests),
        ("Number of concurrent requests", result.mean_concurrency),
        ("Average Input Length (tokens)", _each(result.input_tokens, result.requests)),
        ("Average Output Length (tokens)", _each(result.output_tokens, result.requests)),
    ]


def _each(total: int | None, requests: int | None) -> float | None:
    return None if total is None or not requests else total / requests


def _settings(result: Result, config: RunConfig, work: Inference) -> list[Line]:
    arrivals = "all at once" if work.concurrency >= work.num_requests else None
    rate = result.issue_rate_requests_per_s
    return [
        ("TP Size", config.parallel.tp),
        ("PP Size", config.parallel.pp),
        ("EP Size", config.parallel.ep),
        ("Max Runtime Batch Size", work.max_batch_size),
        ("Max Runtime Tokens", work.max_num_tokens),
        ("KV Memory Percentage", f"{100 * work.kv_fraction:.2f}%"),
        ("Issue Rate (req/sec)", arrivals if rate is None else rate),
    ]


def _totals(result: Result) -> list[Line]:
    duration = result.duration_s
    return [
        ("Request Throughput (req/sec)", result.request_throughput),
        ("Total Output Throughput (tokens/sec)", result.output_tokens_per_s),
        ("Total Token Throughput (tokens/sec)", result.total_tokens_per_s),
        ("Total Latency (ms)", None if duration is None else 1000 * duration),
        ("Average request latency (ms)", _mean(result.e2e_ms)),
        ("Per User Output Throughput [w/ ctx] (tps/user)", result.output_tokens_per_s_per_user),
        ("Per GPU Output Throughput (tps/gpu)", result.output_tokens_per_s_per_gpu),
    ]


def _streamed(result: Result) -> list[Line]:
    return [
        ("Average time-to-first-token [TTFT] (ms)", _mean(result.ttft_ms)),
        ("Average time-per-output-token [TPOT] (ms)", _mean(result.tpot_ms)),
        ("Per User Output Speed (tps/user)", result.output_speed_tokens_per_s),
    ]


def _mean(summary: dict[str, float] | None) -> float | None:
    return None if summary is None else summary.get("mean")


def _breakdowns(result: Result, streaming: bool) -> list[str]:
    """Return percentiles as the original prints them, and ITL, which it lacks, in the same form."""
    speed = result.output_speed_summary_tokens_per_s
    streamed = [
        ("Per-Request Time-per-Output-Token [TPOT] Breakdown (ms)", "TPOT", result.tpot_ms),
        ("Per-Request Time-to-First-Token [TTFT] Breakdown (ms)", "TTFT", result.ttft_ms),
        ("Inter-Token Latency [ITL] Breakdown (ms)", "ITL", result.itl_ms),
        ("Per-Request Generation Throughput [GTPS] Breakdown (tps/user)", "GTPS", speed),
    ]
    lines = []
    for title, short, summary in [
        *(streamed if streaming else []),
        ("Request Latency Breakdown (ms)", "Latency", result.e2e_ms),
    ]:
        if summary:
            lines += ["", f"-- {title}", ""]
            lines += [f"[{short}] {word:<7}: {_value(summary[s])}" for s, word in STATISTICS.items() if s in summary]
    return lines


def _extra_lines(result: Result, work: Inference) -> list[Line]:
    """Return our additional lines, whose labels share no words with those above, so that no parser confuses them."""
    return [
        ("Proxy", result.proxy),
        ("Whole Run (s)", result.duration_s),
        ("Steady Window (s)", _window(result, work)),
        ("Steady Window Generation (tokens/sec)", result.steady_output_tokens_per_s),
        ("Outputs of Requested Length", _lengths(result)),
        ("Failed Requests", result.requests_failed or None),
        ("Warm-up Requests, Left Out", result.warmup_requests),
        ("KV Cache per GPU (GiB)", result.kv_cache_gib),
        ("KV Cache Peak Use", None if result.kv_peak_use is None else f"{100 * result.kv_peak_use:.1f}%"),
        ("Weights per GPU (GiB)", result.weights_gib),
        ("Weights", result.weights_note),
        ("Streaming", "on" if work.streaming else "off"),
        ("Total Energy (J)", result.energy_joules),
        ("Energy Counter", _validity(result)),
        ("Output Tokens per Second per Watt", result.output_tokens_per_joule),
        ("Average GPU Power (W)", result.mean_power_w),
    ]


def _window(result: Result, work: Inference) -> str | None:
    if result.steady_window_s is None:
        return "none: the engine was not full for long enough" if work.streaming else None
    start, end = result.steady_window_s
    fraction = "" if not result.duration_s else f", {100 * (end - start) / result.duration_s:.0f}% of the run"
    return f"{start:.3f} to {end:.3f}{fraction}"


def _lengths(result: Result) -> str | None:
    if result.lengths_wrong is None or result.requests is None:
        return None
    return f"{result.requests - result.lengths_wrong} of {result.requests}"


def _validity(result: Result) -> str | None:
    if result.energy_joules is None:
        return result.energy_note
    verdicts = {True: "agrees with sampled power", False: "DISAGREES with sampled power", None: "not checked"}
    return verdicts[result.energy_valid]
