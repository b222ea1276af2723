"""Page of several runs side by side: rates, step times or latencies, differing settings, and all figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from typing import Any

from llmb.config.load_settings import LoadConfig
from llmb.config.serialization import to_plain
from llmb.perfmodel.metrics import percentile
from llmb.report.page.configuration_cards import flatten
from llmb.report.page.html_blocks import charts_block, link, paragraphs, section, table
from llmb.report.page.page_chart import COLOURS, Chart, axis, fill, plain, thinned_series, values
from llmb.report.page.page_shell import page
from llmb.report.page.run_record import RunRecord
from llmb.report.page.thinning import Thinned, thin
from llmb.report.page.training_charts import steps_by_rank
from llmb.report.page.verdict_card import sentences
from llmb.report.setting_text import settings
from llmb.report.table import number
from llmb.results.result import Result

# Rates and sizes of runs with different batches can be compared; step times cannot.
RATES = (
    ("tokens_per_s_per_gpu", "Tokens/s per GPU", "tokens/s"),
    ("tflops_per_gpu", "TFLOP/s per GPU", "TFLOP/s"),
    ("output_tokens_per_s_per_gpu", "Output tokens/s per GPU", "tokens/s"),
    ("output_tokens_per_s_per_user", "Tokens/s of one user", "tokens/s"),
    ("peak_memory_gib", "Peak memory", "GiB"),
)
LATENCIES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "End to end"))
STATISTICS = ("p50", "p90", "p99")
SKIPPED = ("samples", "latency_intervals_ms", "warnings", "overrides", "last_lines", "versions", "client")


@dataclass(frozen=True)
class _Steps:
    """Steps of a run, as charts show them."""

    box: tuple[float | None, ...]  # ms per 1,000 tokens: smallest, quartiles, largest
    losses: Thinned | None  # over the tokens seen


def several_page(every_record: Iterable[RunRecord]) -> str:
    """Return the page of several runs; the first is what the others are compared with.

    The events of one run at a time are in memory: it may have a million steps.
    """
    records, steps = [], []
    for record in every_record:
        steps.append(_steps_of(record))
        records.append(replace(record, events=()))
        del record  # before the next one is read
    labels = _labels(records)
    charts = [*_rate_charts(records, labels), *_latency_charts(records, labels), *_step_charts(steps, labels)]
    blocks = [
        f"<h1>{escape(', '.join(labels))}</h1>",
        f'<div class="verdict">{paragraphs(_verdict(records, labels))}</div>',
        section("what", "What ran", _descriptions(records, labels), css="long"),
        section("differences", "Settings that differ", _differences(records, labels)),
        section("side-by-side", "Side by side", charts_block(charts), css="long"),
        section("raw-figures", "Every figure", _figures(records, labels), css="long"),
    ]
    return page(f"llmb: {', '.join(labels)}", blocks, charts)


def _labels(records: Sequence[RunRecord]) -> list[str]:
    names = [record.label for record in records]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _rate(result: Result) -> float | None:
    return result.output_tokens_per_s_per_gpu if result.requests is not None else result.tokens_per_s_per_gpu


def _verdict(records: Sequence[RunRecord], labels: Sequence[str]) -> list[str]:
    """Return each run against the first, per token and per GPU."""
    first = _rate(records[0].result)
    lines = []
    for record, label in zip(records[1:], labels[1:], strict=True):
        rate = _rate(record.result)
        if first and rate:
            lines.append(f"{label} processes {rate / first:.3f} times the tokens/s per GPU of {labels[0]}.")
        else:
            lines.append(f"{label} has no rate of tokens to compare with {labels[0]}.")
    return [*lines, "llmb-run compare gives intervals and a verdict that accounts for noise."]


def _descriptions(records: Sequence[RunRecord], labels: Sequence[str]) -> str:
    blocks = []
    for record, label in zip(records, labels, strict=True):
        links = " ".join(link(text, path) for text, path in record.files if path.endswith("report.html"))
        blocks.append(f"<h3>{escape(label)}</h3>{paragraphs(sentences(record))}<p>{links}</p>")
    return "".join(blocks)


def _differences(records: Sequence[RunRecord], labels: Sequence[str]) -> str:
    every = [_settings(record) for record in records]
    names = list(dict.fromkeys(name for pairs in every for name in pairs))
    rows = [(name, *(pairs.get(name, "") for pairs in every)) for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return table("differing", ("setting", *labels), rows) or "<p>All settings are the same.</p>"


def _settings(record: RunRecord) -> dict[str, str]:
    config = record.config
    pairs = to_plain(config.workload).items() if isinstance(config, LoadConfig) else settings(config)
    return {name: str(value) for name, value in pairs}


def _rate_charts(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Chart]:
    charts = []
    for field, title, unit in RATES:
        bars = [(label, getattr(r.result, field)) for label, r in zip(labels, records, strict=True)]
        rows = [(label, value) for label, value in bars if value is not None][::-1]
        if not rows:
            continue
        trace = {
            "type": "bar", "orientation": "h", "y": [plain(label) for label, _ in rows],
            "x": values(v for _, v in rows), "text": [number(value) for _, value in rows], "textposition": "auto",
            "marker": fill(0), "hovertemplate": f"%{{y}}: %{{x:.5g}} {unit}<extra></extra>",
        }  # fmt: skip
        layout = {"xaxis": axis(unit, rangemode="tozero"), "yaxis": {"automargin": True, "type": "category"}}
        charts.append(
            Chart(
                name=f"rate-{field.replace('_', '-')}", title=title, traces=[trace], height=90 + 36 * len(rows),
                layout={**layout, "hovermode": "closest"},
            )
        )  # fmt: skip
    return charts


def _latency_charts(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Chart]:
    charts = []
    for field, title in LATENCIES:
        traces = [
            {
                "type": "bar", "name": plain(label), "x": list(STATISTICS), "marker": fill(i),
                "y": values((getattr(record.result, field) or {}).get(s) for s in STATISTICS),
                "hovertemplate": f"{plain(label)} %{{y:.5g}} ms<extra></extra>",
            }
            for i, (record, label) in enumerate(zip(records, labels, strict=True))
            if getattr(record.result, field)
        ]  # fmt: skip
        if traces:
            layout = {"barmode": "group", "yaxis": axis("ms", rangemode="tozero")}
            name = f"latency-{field.removesuffix('_ms')}"
            charts.append(Chart(name=name, title=f"{title}, ms", traces=traces, layout=layout))
    return charts


def _steps_of(record: RunRecord) -> _Steps:
    by_rank = steps_by_rank(record)
    steps = by_rank[min(by_rank)] if by_rank else []
    times = [1000 * 1000 * s.seconds / s.tokens for s in steps if s.seconds and s.tokens and not s.warmup]
    seen = list(accumulate(float(step.tokens or 0) for step in steps))
    points = [(x, step.loss) for x, step in zip(seen, steps, strict=True) if step.loss is not None and x]
    return _Steps(
        box=tuple(percentile(times, q) for q in (0, 25, 50, 75, 100)) if times else (),
        losses=thin([x for x, _ in points], [y for _, y in points]) if points else None,
    )


def _step_charts(every_run: Sequence[_Steps], labels: Sequence[str]) -> list[Chart]:
    """Return the time of a thousand tokens, as batches may differ, and the losses over the tokens seen."""
    boxes: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    for i, (steps, label) in enumerate(zip(every_run, labels, strict=True)):
        if steps.box:
            low, q1, middle, q3, high = (values([time]) for time in steps.box)
            boxes.append(
                {
                    "type": "box", "x": [plain(label)], "name": plain(label), "lowerfence": low, "q1": q1,
                    "median": middle, "q3": q3, "upperfence": high, "showlegend": False,
                    "marker": {"color": COLOURS[i % len(COLOURS)]},
                }
            )  # fmt: skip
        if steps.losses:
            losses += thinned_series(label, steps.losses, i, dashed=True)
    charts = []
    if boxes:
        layout = {"yaxis": axis("ms"), "xaxis": {"type": "category"}, "hovermode": "closest"}
        caption = "Step time over its tokens, warm-up left out. Box: quartiles; whiskers: smallest and largest."
        charts.append(
            Chart(name="token-time", title="Time of 1,000 tokens", traces=boxes, layout=layout, captions=[caption])
        )
    if losses:
        layout = {"xaxis": axis("tokens"), "yaxis": axis("loss")}
        charts.append(Chart(name="losses", title="Loss over tokens", traces=losses, layout=layout))
    return charts


def _figures(records: Sequence[RunRecord], labels: Sequence[str]) -> str:
    plain_results = [
        dict(flatten({k: v for k, v in to_plain(record.result).items() if k not in SKIPPED})) for record in records
    ]
    names = list(dict.fromkeys(name for figures in plain_results for name in figures))
    rows = [(name, *(figures.get(name) for figures in plain_results)) for name in names]
    every = table("figures", ("figure", *labels), rows)
    return f"<details><summary>{len(rows)} figures</summary>{every}</details>"
