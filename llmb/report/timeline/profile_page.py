"""Profile of a run on one page: six pictures of its timeline with captions, a table, and a trace to zoom into.

    write_profile(folder, measured, predicted, "Llama 3 8B, 64k", [("Chunk", "16384 tokens")]) -> folder/profile.html

The page is self-contained: no script, no network. Each picture is also written beside it as an SVG file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from llmb.config.serialization import write_atomic
from llmb.errors import ConfigError, LaunchError
from llmb.perfmodel.offload.stream_timeline import StreamTimeline
from llmb.report.page.page_shell import head
from llmb.report.timeline.axis_units import duration
from llmb.report.timeline.captions import captions
from llmb.report.timeline.chrome_trace import trace_bytes
from llmb.report.timeline.profile_table import table
from llmb.report.timeline.svg_picture import NARROW_WIDTH, WIDTH, Picture, picture
from llmb.report.timeline.tracks import Timeline, total
from llmb.report.timeline.views import SHORTEST_S, View, views

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
    drawings = list(_drawings(measured_timeline, predicted_timeline))
    for drawing in drawings:
        write_atomic(folder / f"{drawing.view.name}.svg", drawing.wide.alone())
    trace = trace_bytes([measured_timeline, *([predicted_timeline] if predicted_timeline else [])])
    write_atomic(folder / "trace.json.gz", trace.decode("utf-8", "surrogateescape"))  # back to these bytes when written
    page = folder / "profile.html"
    write_atomic(page, _page(title, figures, _sections(drawings, measured_timeline, predicted_timeline)))
    return page


def timeline_sections(measured: StreamTimeline, predicted: StreamTimeline | None) -> str:
    """Return the pictures and the table as sections of any page that has the style of pages."""
    timeline, expected = _timeline(measured), None if predicted is None else _timeline(predicted)
    return "\n".join(_sections(list(_drawings(timeline, expected)), timeline, expected))


@dataclass(frozen=True)
class _Drawing:
    """Picture of a view, for a window and for a small screen."""

    view: View
    sentences: Sequence[str]
    wide: Picture
    narrow: Picture


def _drawings(measured: Timeline, predicted: Timeline | None) -> Iterator[_Drawing]:
    predictions = {view.name: (predicted, view) for view in views(predicted)} if predicted else {}
    for view in views(measured):
        prediction = predictions.get(view.name)
        sentences = captions(measured, view, prediction)
        wide, narrow = (picture(measured, view, prediction, sentences, width) for width in (WIDTH, NARROW_WIDTH))
        yield _Drawing(view, sentences, wide, narrow)


def _sections(drawings: Sequence[_Drawing], measured: Timeline, predicted: Timeline | None) -> list[str]:
    return [
        f'<p class="reading">{_READING}</p>',
        *(_section(drawing, measured) for drawing in drawings),
        '<section id="kinds"><h2>Kinds of work</h2><p class="place">Mean over the steps shown.</p>',
        f'<div class="table">{table(measured, predicted)}</div></section>',
    ]


def _timeline(streams: StreamTimeline) -> Timeline:
    timeline = Timeline.of(streams)
    if not timeline.by_stream["compute"]:
        raise ConfigError(f"nothing to draw: the {streams.source} timeline has no compute event")
    if total(timeline.busy["compute"]) <= SHORTEST_S:
        raise ConfigError(f"nothing to draw: the {streams.source} timeline has no duration")
    return timeline


def _section(drawing: _Drawing, timeline: Timeline) -> str:
    view = drawing.view
    place = f"{view.place[0].upper()}{view.place[1:]}, {duration(view.seconds)} {timeline.streams.source}."
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in drawing.sentences)
    pictures = f'<div class="wide">{drawing.wide.on_page()}</div><div class="narrow">{drawing.narrow.on_page()}</div>'
    return (
        f'<section id="{view.name}"><h2>{escape(view.title)}</h2><p class="place">{escape(place)}</p>'
        f"<figure>{pictures}</figure>{paragraphs}</section>"
    )


def _page(title: str, figures: Sequence[tuple[str, str]], sections: Sequence[str]) -> str:
    tiles = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in figures)
    return "\n".join(
        [
            head(title),
            f"<h1>{escape(title)}</h1>",
            f'<dl class="figures">{tiles}</dl>' if tiles else "",
            *sections,
            f'<p class="reading">{_TRACE}</p>',
            "</body></html>\n",
        ]
    )
