"""Page of a sweep: the Pareto chart with knee and SLO tiers, latencies and throughput by load, and the table."""

from collections.abc import Sequence
from html import escape

from llmb.perfmodel.tune.pareto import pareto_set
from llmb.report.page.html_blocks import charts_block, link, paragraphs, section, table
from llmb.report.page.page_chart import COLOURS, DASHES, SYMBOLS, Chart, Trace, axis, plain, values
from llmb.report.page.page_shell import page
from llmb.report.sweep_table import KNEE_DEFINITION, describe_load, marks, row_doubts, tier_text
from llmb.report.table import number
from llmb.results.sweep.sweep_points import FIGURES, LOAD_UNITS, SUMMARIES, SweepRow
from llmb.results.sweep.sweep_result import SweepResult

TABLE_STATISTICS = ("p50", "p99")


def sweep_page(result: SweepResult, files: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page of a sweep."""
    charts = [pareto_figure(result), *_by_load(result)] if result.rows else []
    links = "".join(f"<li>{link(label, path)}</li>" for label, path in files)
    blocks = [
        f"<h1>{escape(result.target or result.name)}</h1>",
        f'<div class="verdict">{paragraphs(_sentences(result))}</div>',
        section("pareto-set", "Throughput against the speed of one user", charts_block(charts[:1])),
        section("tiers", "SLO tiers", paragraphs(tier_text(answer, result) for answer in result.tiers)),
        section(
            "doubts", "What speaks against them", paragraphs(text for row in result.rows for text in row_doubts(row))
        ),
        section("by-load", "By load", charts_block(charts[1:])),
        section("rows", "Every load", _table(result), "Medians over repeats; latencies in ms.", "long"),
        section("files", "Files", f"<ul>{links}</ul>" if links else ""),
    ]
    return page(result.name, blocks, charts)


def _sentences(result: SweepResult) -> list[str]:
    gpus = f" on {result.gpus} GPU{'s' if result.gpus != 1 else ''}" if result.gpus else ""
    finished = "" if result.finished else " It is not finished: more points were planned."
    lines = [f"{result.points} points were measured{gpus} in {number(result.wall_s)} s.{finished}"]
    usable = [i for i, row in enumerate(result.rows) if row.excluded is None and getattr(row, result.pareto_y)]
    excluded = [row for row in result.rows if row.excluded is not None]
    if usable:
        best = max(usable, key=lambda i: getattr(result.rows[i], result.pareto_y))
        lines.append(f"The highest throughput{' that counts' if excluded else ''} is {_point(result, best)}.")
    if result.knee is not None:
        lines.append(f"The knee, the best compromise, is {_point(result, result.knee)}.")
    if excluded:
        more = "; the table has the other reasons" if len(excluded) > 1 else ""
        reason = f"{describe_load(excluded[0])} ({excluded[0].excluded}){more}"
        lines.append(f"{len(excluded)} of {len(result.rows)} loads are excluded: {reason}.")
    return lines


def _point(result: SweepResult, i: int) -> str:
    row = result.rows[i]
    x, y = getattr(row, result.pareto_x), getattr(row, result.pareto_y)
    user = "" if x is None else f" at {number(x)} tokens/s for one user"
    return f"{number(y)} output tokens/s{' per GPU' if result.gpus else ''}{user}, {describe_load(row)}"


def pareto_figure(result: SweepResult) -> Chart:
    """Return tokens/s per GPU over tokens/s of one user: a line through the Pareto set of each variant."""
    traces: list[Trace] = []
    notes = []
    for v, variant in enumerate(dict.fromkeys(row.variant for row in result.rows)):
        rows = [i for i, row in enumerate(result.rows) if row.variant == variant and None not in _values(result, i)]
        usable = [i for i in rows if result.rows[i].excluded is None]
        places = [(x or 0.0, y or 0.0) for x, y in (_values(result, i) for i in usable)]
        front = sorted(places[k] for k in pareto_set(places))
        colour, name = COLOURS[v % len(COLOURS)], plain(variant or "points")
        traces.append(
            {
                "type": "scatter", "mode": "lines", "x": values(x for x, _ in front), "y": values(y for _, y in front),
                "line": {"color": colour, "dash": DASHES[v % len(DASHES)]}, "hoverinfo": "skip", "showlegend": False,
            }
        )  # fmt: skip
        symbol = SYMBOLS[v % len(SYMBOLS)]
        traces.append(
            {
                "type": "scatter", "mode": "markers+text", "name": name,
                "x": values(_values(result, i)[0] for i in rows), "y": values(_values(result, i)[1] for i in rows),
                "text": [f"{result.rows[i].load:g}" for i in rows], "textposition": "top right", "cliponaxis": False,
                "marker": {"color": colour, "size": 9, "symbol": [_symbol(result, i, symbol) for i in rows]},
                "customdata": [plain(_hover(result, i)) for i in rows],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )  # fmt: skip
    special = {result.knee: ["knee"]} if result.knee is not None else {}
    for answer in result.tiers:
        if answer.row is not None:
            special.setdefault(answer.row, []).append(answer.tier)
    for i, words in special.items():
        x, y = _values(result, i)
        if x is not None and y is not None:
            arrow = {"showarrow": True, "arrowhead": 0, "ax": -34, "ay": 30}
            notes.append({"x": x, "y": y, "text": plain(", ".join(words)), **arrow})
    unit = "output tokens/s per GPU" if result.gpus else "output tokens/s of the server"
    loads = f"Labels are {result.rows[0].load_kind}, {LOAD_UNITS[result.rows[0].load_kind]}."
    reading = "Filled: in the Pareto set; open: not in it; cross: excluded, with the reason in the table."
    return Chart(
        name="pareto", title=f"{unit} over tokens/s of one user", traces=traces, whole=True, height=460,
        layout={"xaxis": axis("tokens/s of one user", rangemode="tozero"), "yaxis": axis(unit, rangemode="tozero"),
                "annotations": notes, "hovermode": "closest"},
        captions=[f"{loads} {reading}", *([f"{KNEE_DEFINITION}."] if result.knee is not None else [])],
    )  # fmt: skip


def _symbol(result: SweepResult, i: int, symbol: str) -> str:
    if result.rows[i].excluded is not None:
        return "x-thin-open"
    return symbol if i in result.pareto else f"{symbol}-open"


def _values(result: SweepResult, i: int) -> tuple[float | None, float | None]:
    return getattr(result.rows[i], result.pareto_x), getattr(result.rows[i], result.pareto_y)


def _hover(result: SweepResult, i: int) -> str:
    return f"{_point(result, i)}; {result.rows[i].excluded or marks(result, i) or 'not in the Pareto set'}"


def _by_load(result: SweepResult) -> list[Chart]:
    """Return throughput and the latencies over the load, a line for each variant and statistic."""
    kind = result.rows[0].load_kind
    figures: list[tuple[str, str | None, str, str]] = [("output_tokens_per_s", None, "Output tokens/s", "tokens/s")]
    figures += [("ttft_ms", "p99", "TTFT p99", "ms"), ("tpot_ms", "p99", "TPOT p99", "ms")]
    charts = []
    for field, statistic, title, unit in figures:
        traces: list[Trace] = []
        for v, variant in enumerate(dict.fromkeys(row.variant for row in result.rows)):
            points = [(r.load, _figure(r, field, statistic)) for r in result.rows if r.variant == variant]
            measured = [(x, y) for x, y in points if y is not None]
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": plain(variant or title),
                    "x": values(x for x, _ in measured), "y": values(y for _, y in measured),
                    "line": {"color": COLOURS[v % len(COLOURS)], "dash": DASHES[v % len(DASHES)]},
                    "marker": {"symbol": SYMBOLS[v % len(SYMBOLS)]},
                    "hovertemplate": f"{plain(variant or title)} %{{y:.5g}} {unit}<extra></extra>",
                }
            )  # fmt: skip
        if any(trace["y"] for trace in traces):
            layout = {"xaxis": axis(f"{kind}, {LOAD_UNITS[kind]}"), "yaxis": axis(unit, rangemode="tozero")}
            caption = f"{title} of every measured load, excluded ones included."
            name = f"load-{field.replace('_', '-')}"
            charts.append(Chart(name=name, title=title, traces=traces, layout=layout, captions=[caption]))
    return charts


def _figure(row: SweepRow, field: str, statistic: str | None) -> float | None:
    value = getattr(row, field)
    return value if statistic is None else (value or {}).get(statistic)


def _table(result: SweepResult) -> str:
    columns = [name for name in FIGURES if any(getattr(row, name) is not None for row in result.rows)]
    statistics = [(name, s) for name in SUMMARIES for s in TABLE_STATISTICS]
    header = ("variant", "load", "requests", *columns, *(f"{name} {s}" for name, s in statistics), "mark", "excluded")
    rows = [
        (
            row.variant, row.load, row.requests, *(getattr(row, name) for name in columns),
            *(_figure(row, name, s) for name, s in statistics), marks(result, i), row.excluded,
        )
        for i, row in enumerate(result.rows)
    ]  # fmt: skip
    return table("loads", header, rows, "")
