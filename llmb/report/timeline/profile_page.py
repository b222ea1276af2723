"""Profile of a run on one page: six pictures of its timeline with captions, a table, and a trace to zoom into.

    write_profile(folder, measured, predicted, "Llama 3 8B, 64k", [("Chunk", "16384 tokens")]) -> folder/profile.html

The page is self-contained: no script, no network. Each picture is also written beside it as an SVG file.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from llmb.config.serialization import write_atomic
from llmb.errors import ConfigError, LaunchError
from llmb.perfmodel.offload.stream_timeline import StreamTimeline
from llmb.report.timeline.axis_units import duration
from llmb.report.timeline.captions import captions
from llmb.report.timeline.chrome_trace import trace_bytes
from llmb.report.timeline.profile_table import table
from llmb.report.timeline.svg_picture import picture
from llmb.report.timeline.svg_style import FONT, style, textures
from llmb.report.timeline.tracks import Timeline, total
from llmb.report.timeline.views import SHORTEST_S, View, views

_PAGE_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1264px;padding:28px 32px 48px;background:var(--paper);color:var(--ink);
font-size:15px;line-height:1.55}
h1{font-size:26px;line-height:1.25;margin:0 0 4px}
h2{font-size:19px;margin:40px 0 2px}
p{margin:6px 0;max-width:110ch}
.place,.reading{color:var(--soft)}
.figures{display:flex;flex-wrap:wrap;gap:10px;margin:20px 0;padding:0}
.figures div{background:var(--track);border-radius:6px;padding:8px 14px;min-width:130px}
.figures dt{color:var(--soft);font-size:12.5px}
.figures dd{margin:0;font-size:17px;font-weight:600}
figure{margin:10px 0 8px;overflow-x:auto}
figure svg{display:block;width:100%;min-width:900px;height:auto}
.table{overflow-x:auto}
table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;font-size:14px}
thead th{color:var(--soft);font-weight:600;border-bottom-width:2px}
tbody th,td:first-child,thead th:nth-child(-n+2){text-align:left}
tbody th{font-weight:500}
.swatch{width:18px;height:12px;margin-right:8px;vertical-align:-1px}
.hidden{position:absolute;width:0;height:0}
@page{size:A4 landscape;margin:12mm}
@media print{body{max-width:none;padding:0;font-size:12px;-webkit-print-color-adjust:exact;print-color-adjust:exact}
section{break-inside:avoid}figure,.table{overflow:visible}figure svg{min-width:0}h2{margin-top:18px}
th,td{font-size:11px;padding:3px 8px}}
"""
_READING = (
    "All pictures have the same layout. At the top are the named ranges; below, what the GPU computes, what the link "
    "copies in and out; at the bottom what was achieved, with a dashed line at what is possible. Rounds, layers and "
    "chunks are numbered from 0. Where work is narrower than a column of the picture, the height of a colour is its "
    "fraction of that column's time. A computation waits for the copy that ends when it resumes."
)
_TRACE = "The whole timeline is in trace.json.gz beside this page, for Perfetto or chrome://tracing."


def write_profile(
    folder: Path,
    measured: StreamTimeline,
    predicted: StreamTimeline | None,
    title: str,
    figures: Sequence[tuple[str, str]],
) -> Path:
    """Write the page, its pictures and the trace into a folder; returns the page's path."""
    measured_timeline = _timeline(measured)
    predicted_timeline = None if predicted is None else _timeline(predicted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot make the folder {folder}: {error.strerror}") from error
    predictions = (
        {view.name: (predicted_timeline, view) for view in views(predicted_timeline)} if predicted_timeline else {}
    )
    sections = []
    for view in views(measured_timeline):
        prediction = predictions.get(view.name)
        sentences = captions(measured_timeline, view, prediction)
        svg = picture(measured_timeline, view, prediction, sentences)
        write_atomic(folder / f"{view.name}.svg", svg.alone())
        sections.append(_section(view, measured_timeline, svg.on_page(), sentences))
    trace = trace_bytes([measured_timeline, *([predicted_timeline] if predicted_timeline else [])])
    write_atomic(folder / "trace.json.gz", trace.decode("utf-8", "surrogateescape"))  # back to these bytes when written
    page = folder / "profile.html"
    write_atomic(page, _page(title, figures, sections, table(measured_timeline, predicted_timeline)))
    return page


def _timeline(streams: StreamTimeline) -> Timeline:
    timeline = Timeline.of(streams)
    if not timeline.by_stream["compute"]:
        raise ConfigError(f"nothing to draw: the {streams.source} timeline has no compute event")
    if total(timeline.busy["compute"]) <= SHORTEST_S:
        raise ConfigError(f"nothing to draw: the {streams.source} timeline has no duration")
    return timeline


def _section(view: View, timeline: Timeline, svg: str, sentences: Sequence[str]) -> str:
    place = f"{view.place[0].upper()}{view.place[1:]}, {duration(view.seconds)} {timeline.streams.source}."
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        f'<section id="{view.name}"><h2>{escape(view.title)}</h2><p class="place">{escape(place)}</p>'
        f"<figure>{svg}</figure>{paragraphs}</section>"
    )


def _page(title: str, figures: Sequence[tuple[str, str]], sections: Sequence[str], table_html: str) -> str:
    tiles = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in figures)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>body{{font-family:{FONT}}}\n{style()}{_PAGE_STYLE}</style></head><body>",
            f'<svg class="hidden" aria-hidden="true">{textures()}</svg>',
            f"<h1>{escape(title)}</h1>",
            f'<dl class="figures">{tiles}</dl>' if tiles else "",
            f'<p class="reading">{_READING}</p>',
            *sections,
            '<section id="kinds"><h2>Kinds of work</h2><p class="place">Mean over the steps shown.</p>',
            f'<div class="table">{table_html}</div></section>',
            f'<p class="reading">{_TRACE}</p>',
            "</body></html>\n",
        ]
    )
