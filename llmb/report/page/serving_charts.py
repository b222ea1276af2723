"""Charts of a serving run: distributions of latencies, and tokens/s, concurrency, KV cache and arrivals over time."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import log10, sqrt
from typing import Any

from llmb.events import RequestDone, ServingSample
from llmb.perfmodel.metrics import e2e_ms, itl_ms, percentile, ttft_ms
from llmb.perfmodel.samples.timed_requests import TimedRequests
from llmb.report.page.page_chart import Chart, axis, fill, series, shaded, thinned_series, values, vertical_line
from llmb.report.page.run_record import RunRecord
from llmb.report.page.telemetry_chart import telemetry_chart
from llmb.report.page.thinning import thin
from llmb.report.table import number
from llmb.results.recorded_events import completed_requests, measured_requests

COLUMNS = (12, 60)  # of a histogram: with few samples, and at most
TIME_BINS = 100
WIDE = 50.0  # ratio of p99.9 to p0.1 from which on columns are equally wide on a logarithmic scale
MOST_GAPS = 200_000  # between tokens, taken for a histogram
MOST_TOKENS = 500_000  # counted one by one in tokens/s
LATENCIES = (
    ("ttft", "TTFT", "from arrival to the first token"),
    ("tpot", "TPOT", "per output token after the first"),
    ("itl", "ITL", "between two tokens as they arrive"),
    ("e2e", "End to end", "from arrival to the last token"),
)


def serving_charts(record: RunRecord) -> list[Chart]:
    """Return the charts of all that was recorded."""
    measured = measured_requests(record.events)
    done = completed_requests(record.events)
    charts = [*_latency_charts(record, done), *_over_time(record, done), _arrivals(measured), _cache(record)]
    charts.append(telemetry_chart(record))
    return [chart for chart in charts if chart is not None]


def _latency_charts(record: RunRecord, done: TimedRequests) -> list[Chart | None]:
    stride = max(1, sum(len(request.token_times) for request in done) // MOST_GAPS)
    samples: dict[str, Sequence[float | None]] = {
        "ttft": done.ttft_ms,
        "tpot": done.tpot_ms,
        "itl": [gap for request in done[::stride] for gap in itl_ms(request)],
        "e2e": done.e2e_ms,
    }
    if record.result.ttft_ms is None:  # not streamed: a response arrives whole
        samples = {"e2e": samples["e2e"]}
    charts: list[Chart | None] = []
    for i, (name, title, words) in enumerate(LATENCIES):
        summary = getattr(record.result, f"{name}_ms") or {}
        latencies = [value for value in samples.get(name, []) if value is not None]
        noun = "gaps" if name == "itl" else "requests"
        thinned = f" The columns are of every {stride}th request." if name == "itl" and stride > 1 else ""
        limit = (record.result.slo or {}).get(f"{name}_ms")
        charts.append(
            _histogram(f"{name}-distribution", f"{title}, ms: {words}", latencies, summary, noun, i, limit, thinned)
        )
    return charts


def _histogram(
    name: str, title: str, samples: Sequence[float], summary: dict[str, float], noun: str, index: int,
    limit: float | None, thinned: str,
) -> Chart | None:  # fmt: skip
    if not samples:
        return None
    ranked = sorted(samples)
    low, high = percentile(ranked, 0.1), percentile(ranked, 99.9)
    logarithmic = bool(low and high and high / low > WIDE)
    columns = min(max(COLUMNS[0], round(2 * sqrt(len(ranked)))), COLUMNS[1])
    edges = _edges(ranked[0], ranked[-1], logarithmic, columns)
    counts = [bisect_right(ranked, b) - bisect_right(ranked, a) for a, b in pairwise(edges)]
    counts[0] += bisect_right(ranked, edges[0])
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "x": values((a + b) / 2 for a, b in pairwise(edges)), "y": counts,
            "width": values(b - a for a, b in pairwise(edges)), "marker": fill(index),
            "name": noun, "hovertemplate": "%{x:.4g} ms: %{y} " + noun + "<extra></extra>",
        }
    ]  # fmt: skip
    shapes, notes = [], []
    marks: list[tuple[str, float]] = [(key, summary[key]) for key in ("p50", "p90", "p99") if key in summary]
    marks += [] if limit is None else [("SLO", limit)]
    for level, (key, value) in enumerate(marks):
        shape, note = vertical_line(value, f"{key} {number(value)}", level)
        if logarithmic:  # annotations of a logarithmic axis are placed by exponent
            note["x"] = log10(value) if value > 0 else 0.0
        shapes.append(shape)
        notes.append(note)
    scale = " The scale is logarithmic." if logarithmic else ""
    spread = f"{len(samples):,} {noun}, from {number(ranked[0])} to {number(ranked[-1])} ms.{scale}{thinned}"
    layout = {
        "xaxis": axis("ms", type="log" if logarithmic else "linear"), "yaxis": axis(noun), "bargap": 0,
        "shapes": shapes, "annotations": notes, "hovermode": "closest",
    }  # fmt: skip
    return Chart(name=name, title=title, traces=traces, layout=layout, captions=[spread], height=260)


def _edges(low: float, high: float, logarithmic: bool, columns: int) -> list[float]:
    if high <= low:
        pad = abs(low) * 0.05 or 0.5
        return [low - pad, low + pad]
    if logarithmic and low > 0:
        return [low * (high / low) ** (i / columns) for i in range(columns)] + [high]
    return [low + (high - low) * i / columns for i in range(columns)] + [high]


def _over_time(record: RunRecord, done: TimedRequests) -> list[Chart | None]:
    """Return tokens/s and concurrency in bins of time."""
    if not done:
        return []
    start, end = min(done.arrivals), max(done.ends)
    width = (end - start) / TIME_BINS
    if width <= 0:
        return []
    middles = [start + (i + 0.5) * width for i in range(TIME_BINS)]
    one_by_one = sum(len(request.token_times) for request in done) <= MOST_TOKENS
    rates = _token_rates(done, start, width, one_by_one)
    shapes = []
    captions = [f"Output tokens in each of {TIME_BINS} bins of {number(width)} s."]
    if not one_by_one or not any(request.token_times for request in done):
        captions.append("The tokens of a request are spread evenly from its first token to its end.")
    window = record.result.steady_window_s
    if window is not None and record.result.steady_output_tokens_per_s is not None:
        shapes.append(shaded(window[0], window[1]))
        steady = number(record.result.steady_output_tokens_per_s)
        captions.append(f"Shaded: the steady window, in which the engine is full: {steady} tokens/s.")
    throughput = Chart(
        name="tokens-per-s", title="Output tokens/s over time", captions=captions, whole=True,
        traces=series("output tokens/s", middles, rates, 0),
        layout={"xaxis": axis("s since the start"), "yaxis": axis("tokens/s", rangemode="tozero"), "shapes": shapes},
    )  # fmt: skip
    return [throughput, _concurrency(record, done, middles)]


def _token_rates(done: Sequence[RequestDone], start: float, width: float, one_by_one: bool) -> list[float]:
    counts = [0.0] * TIME_BINS
    for request in done:
        if one_by_one and len(request.token_times) == request.output_tokens:
            for time in request.token_times:
                counts[_bin(time, start, width)] += 1
            continue
        first = request.first_token if request.first_token is not None else request.arrival
        a, b = _bin(first, start, width), _bin(request.end, start, width)
        for i in range(a, b + 1):
            counts[i] += request.output_tokens / (b - a + 1)
    return [count / width for count in counts]


def _bin(time: float, start: float, width: float) -> int:
    return min(TIME_BINS - 1, max(0, int((time - start) / width)))


def _concurrency(record: RunRecord, done: TimedRequests, middles: Sequence[float]) -> Chart:
    """Return the requests in progress at the middle of each bin, and those that wait in the engine's queue."""
    arrivals, ends = sorted(done.arrivals), sorted(done.ends)
    active = [float(bisect_right(arrivals, time) - bisect_right(ends, time)) for time in middles]
    traces = series("in progress", middles, active, 0)
    caption = "Requests that had arrived and not ended, at the middle of each bin."
    samples = [s for s in record.of_type(ServingSample) if not s.warmup and s.rank == 0 and s.waiting is not None]
    if samples:
        times = [sample.elapsed_s for sample in samples]
        traces += series("waiting in the queue", times, [float(s.waiting or 0) for s in samples], 1, dashed=True)
        caption += " Waiting: not scheduled yet, as the engine reports it."
    return Chart(
        name="concurrency", title="Concurrency over time", traces=traces, captions=[caption],
        layout={"xaxis": axis("s since the start"), "yaxis": axis("requests", rangemode="tozero")},
    )  # fmt: skip


def _arrivals(measured: Sequence[RequestDone]) -> Chart | None:
    """Return the TTFT, or without streaming the whole time, of requests in order of arrival.

    None where all arrived at once: every point would lie on one vertical line.
    """
    latencies = [(r.arrival, ttft_ms(r) if r.first_token is not None else e2e_ms(r)) for r in measured if not r.error]
    points = sorted((arrival, value) for arrival, value in latencies if value is not None)
    if not points or (points[0][0] == points[-1][0] and len(points) > 1):
        return None
    bins = thin([x for x, _ in points], [y for _, y in points])
    traces = thinned_series("latency", bins, 4, "%{y:.5g} ms")
    if bins.per_bin == 1:
        traces[0] |= {"mode": "markers", "marker": {"size": 5, "color": "#7a4fb0", "opacity": 0.7}}
    failed = [request for request in measured if request.error is not None]
    if failed:
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": "failed", "x": values(r.arrival for r in failed[:1000]),
                "y": values(1000 * (r.end - r.arrival) for r in failed[:1000]),
                "marker": {"symbol": "x", "color": "#b8325a", "size": 8}, "hovertemplate": "failed<extra></extra>",
            }
        )  # fmt: skip
    streamed = any(request.first_token is not None for request in measured)
    latency = "TTFT" if streamed else "time to the whole response"
    span = points[-1][0] - points[0][0]
    pace = f" They arrived over {number(span)} s, {number(len(points) / span)} a second." if span else ""
    captions = [
        f"The {latency} of each request by its arrival.{pace}",
        *([t] if (t := bins.caption("requests")) else []),
    ]
    layout = {"xaxis": axis("arrival, s"), "yaxis": axis("ms", rangemode="tozero"), "hovermode": "closest"}
    return Chart(name="arrivals", title="Arrivals and their latency", traces=traces, layout=layout, captions=captions)


def _cache(record: RunRecord) -> Chart | None:
    """Return the use of the KV cache over time, by rank."""
    samples = [s for s in record.of_type(ServingSample) if not s.warmup and s.blocks_used is not None and s.blocks]
    ranks = sorted({sample.rank for sample in samples})
    traces: list[dict[str, Any]] = []
    for i, rank in enumerate(ranks[:8]):
        uses = [(s.elapsed_s, 100 * (s.blocks_used or 0) / (s.blocks or 1)) for s in samples if s.rank == rank]
        traces += series(f"rank {rank}", [x for x, _ in uses], [y for _, y in uses], i, "%{y:.3g} %", dashed=True)
    if not traces:
        return None
    captions = [f"Blocks in use of {max(s.blocks or 0 for s in samples):,}, sampled a few times a second."]
    captions += [f"The first 8 of {len(ranks)} ranks."] if len(ranks) > 8 else []
    layout = {"xaxis": axis("s since the start"), "yaxis": axis("% of blocks", range=[0, 105])}
    return Chart(name="kv-cache", title="KV cache in use", traces=traces, layout=layout, captions=captions)
