"""Rows of a summary that only a load on a server has: goodput, prefix cache, cost, scheduled latency, the client."""

from collections.abc import Iterator

from llmb.report.table import number
from llmb.results.result import Result

Row = tuple[str, str, str, str]
Distribution = tuple[str, dict[str, float] | None, str, str]
EQUAL = 0.01  # of a latency, below which the scheduled-time one says nothing new


def load_rows(result: Result) -> Iterator[Row]:
    """Yield a row for each figure that is known."""
    if result.slo is not None and result.goodput_requests_per_s is not None and result.slo_fraction is not None:
        limits = ", ".join(f"{name.removesuffix('_ms')} {number(value)} ms" for name, value in result.slo.items())
        yield "goodput", number(result.goodput_requests_per_s), "requests/s", f"that hold {limits}"
        tokens = result.goodput_tokens_per_s or 0.0
        yield "goodput, output", number(tokens), "tokens/s", "of these requests"
        yield "within the SLO", f"{100 * result.slo_fraction:.1f}", "%", "of all requests, failed ones included"
    if result.prefix_hit_rate is not None:
        possible = result.prefix_hit_rate_possible
        possible_text = "" if possible is None else f"; {100 * possible:.1f} % were possible"
        explanation = f"of input tokens, by the {result.prefix_hit_source}{possible_text}"
        yield "prefix cache hits", f"{100 * result.prefix_hit_rate:.1f}", "%", explanation
    elif result.prefix_hit_rate_possible:
        explanation = "of input tokens, with an unlimited cache; the server does not say how many were"
        yield "prefix hits possible", f"{100 * result.prefix_hit_rate_possible:.1f}", "%", explanation
    if result.tokens_per_chunk is not None and abs(result.tokens_per_chunk - 1) > EQUAL:
        yield "tokens per chunk", number(result.tokens_per_chunk), "", "of the stream: ITL is between chunks"
    if result.lengths_wrong:
        yield (
            "other lengths",
            f"{result.lengths_wrong:,}",
            "requests",
            "with fewer or more output tokens than requested",
        )
    for name, count in result.errors.items():
        yield f"failed: {name}", f"{count:,}", "requests", "left out of all latencies"
    if result.cost_per_million_output_tokens is not None:
        yield (
            "cost, output",
            number(result.cost_per_million_output_tokens),
            "per 1M",
            "output tokens, all GPUs together",
        )
    if result.cost_per_million_tokens is not None:
        yield "cost, all tokens", number(result.cost_per_million_tokens), "per 1M", "input and output tokens"
    if result.joules_per_million_output_tokens is not None:
        yield "energy, output", number(result.joules_per_million_output_tokens), "J per 1M", "output tokens"


def load_distributions(result: Result) -> Iterator[Distribution]:
    """Yield latencies from the scheduled time where they differ from those from the send time."""
    for name, sent, scheduled in (
        ("TTFT, scheduled", result.ttft_ms, result.ttft_scheduled_ms),
        ("end to end, sched.", result.e2e_ms, result.e2e_scheduled_ms),
    ):
        if sent and scheduled and any(scheduled[key] > sent[key] * (1 + EQUAL) for key in sent):
            yield name, scheduled, "ms", "the same from when the request was due"


def interval_line(result: Result) -> str | None:
    """Return the intervals of the main percentiles over requests, in one line; None where there are none."""
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
    parts = [
        f"{names[name]} {key} {number(interval[0])} to {number(interval[1])} ms"
        for name, intervals in result.latency_intervals_ms.items()
        for key, interval in intervals.items()
        if name in names and key in ("p50", "p99")
    ]
    return f"95 % intervals over requests: {', '.join(parts)}" if parts else None


def client_line(result: Result) -> str | None:
    """Return what the load generator cost, in one line; None of a run without one."""
    client = result.client
    if client is None:
        return None
    processes = client.get("processes") or 1
    parts = [f"{processes} process{'es' if processes > 1 else ''}"]
    if "cpu_fraction" in client:
        parts.append(f"busy {100 * client['cpu_fraction']:.0f} %")
    if client.keys() >= {"request_cost_us", "token_cost_us"}:
        cost = f"{client['request_cost_us']:.0f} us a request and {client['token_cost_us']:.1f} us a token"
        parts.append(f"{cost} on a no-op server")
    for name, words in (("lateness_ms", "sent"), ("loop_lag_ms", "read")):
        late = client.get(name) or {}
        if late.keys() >= {"p50", "p99"}:
            parts.append(f"{words} {late['p50']:.2f} ms late (p50), {late['p99']:.2f} ms (p99)")
    return f"client: {', '.join(parts)}"
