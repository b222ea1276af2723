"""Page of one run: training, serving, or out of core."""

from llmb.config.spec import Inference
from llmb.report.page import serving_charts as serving
from llmb.report.page import waterfall_chart
from llmb.report.page.ceilings_card import ceilings
from llmb.report.page.configuration_cards import configuration, figures_table, provenance, samples, warning_blocks
from llmb.report.page.goodput_card import goodput_section
from llmb.report.page.html_blocks import charts_block, paragraphs, section, table
from llmb.report.page.page_chart import Chart
from llmb.report.page.page_shell import page
from llmb.report.page.run_record import RunRecord
from llmb.report.page.training_charts import memory_by_kind, training_charts
from llmb.report.page.verdict_card import bar_chart, sentences
from llmb.report.table import number


def run_page(record: RunRecord) -> str:
    """Return the page of a run."""
    bar = bar_chart(record)
    comparison = [bar] if bar is not None else []
    time_charts, time_block = _time(record)
    if record.result.requests is not None or record.result.output_tokens_per_s is not None:
        measured, title = serving.serving_charts(record), "Requests"
        kinds = memory_by_kind(record) if isinstance(record.config.workload, Inference) else None
        measured += [kinds] if kinds is not None else []
    else:
        measured, title = training_charts(record), "Steps"
    blocks = [
        f"<h1>{_title(record)}</h1>",
        f'<div class="verdict">{paragraphs(sentences(record))}</div>{charts_block(comparison)}',
        warning_blocks(record.result),
        section("time", "Where the time went", time_block),
        section("measured", title, charts_block(measured), css="long"),
        goodput_section(record.result),
        ceilings(record),
        record.timelines,
        configuration(record),
        provenance(record),
        figures_table(record.result),
        samples(record),
    ]
    return page(f"{record.label}: {record.result.name}", blocks, [*comparison, *time_charts, *measured])


def _title(record: RunRecord) -> str:
    from html import escape

    result = record.result
    words = [result.target or result.name, result.size, result.dtype, f"x{result.gpus}" if result.gpus else None]
    return f'{escape(" ".join(word for word in words if word))} <small class="place">{escape(record.label)}</small>'


def _time(record: RunRecord) -> tuple[list[Chart], str]:
    """Return the charts of where the time went, and their block with the arithmetic as a table."""
    if record.config.workload.kind in ("training", "outofcore"):
        chart = waterfall_chart.step_chart(record)
        if chart is None and record.config.workload.kind == "outofcore":
            chart = waterfall_chart.plan_chart(record)
            if chart is not None:
                return [chart], charts_block([chart])
        if chart is None and record.timelines:
            return [], paragraphs(["The timelines below show it, stream by stream."], "place")
        if chart is None:
            note = record.config.predicted.note if record.config.predicted is not None else None
            why = f"It is neither profiled nor predicted{f' ({note})' if note else ''}: run it with -p to measure it."
            return [], paragraphs([why], "place")
        rows = [
            (bar.name, bar.seconds, f"{number(bar.seconds)} s = {bar.arithmetic}")
            for bar in waterfall_chart.step_bars(record)
        ]
        arithmetic = table("arithmetic", ("kind of work", "seconds of a step", "arithmetic"), rows)
        return [chart], f"{charts_block([chart])}<details><summary>The arithmetic</summary>{arithmetic}</details>"
    charts = waterfall_chart.serving_charts(record)
    return charts, charts_block(charts)
