"""Picture of a timeline as SVG text, written without a drawing library or script; same bytes for same data.

    picture(timeline, view).alone() -> "<svg ...>"

From the top: named ranges, what the GPU computes, what is copied in and out, and read from disk and written where one
is used, then strips of TFLOP/s, of GB/s and of memory in use, all over one time axis. A prediction of the same interval
adds its compute track below the measured one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from llmb.perfmodel.offload.stream_timeline import DISK_STREAMS, STREAMS, StreamName, TimelineEvent
from llmb.report.timeline.axis_units import ceiling, duration, figures
from llmb.report.timeline.pixel_columns import Columns, levels, spread
from llmb.report.timeline.svg_rows import (
    NARROW,
    RANGE_HEIGHT,
    axis,
    legend,
    range_row,
    row_name,
    strip_row,
    text,
    track_row,
)
from llmb.report.timeline.svg_style import style, textures
from llmb.report.timeline.task_kinds import DIRECTIONS, STREAM_LABELS, WAIT, WorkKind, order, work_kind
from llmb.report.timeline.tracks import Timeline, Wait
from llmb.report.timeline.views import View

WIDTH, NARROW_WIDTH = 1200, 600  # for a window, and for a small screen
LEFT, MARGIN = 156, 14  # beside the columns
HEIGHTS: dict[StreamName, int] = {"compute": 36, "inbound": 26, "outbound": 26, "disk_read": 26, "disk_write": 26}
PREDICTED_HEIGHT = 16
STRIP = 36
GAP = 8
TOP = 4
HEADING = 32  # of a picture in a file of its own
NARROWEST_RANGE = 3.0  # pixels on average, below which a level of ranges is left out


@dataclass(frozen=True)
class Picture:
    """A drawing, to be put on a page or into a file of its own."""

    name: str
    captions: str
    svg: str
    height: int
    width: int = WIDTH

    def on_page(self) -> str:
        """Return the drawing for a page, which has style, textures and a heading of its own."""
        return self._svg(self.height, self.svg)

    def alone(self) -> str:
        """Return the drawing with all that it needs."""
        height = self.height + HEADING
        ground = f'<rect class="paper" width="{self.width}" height="{height}"/>'
        moved = f'<g transform="translate(0 {HEADING})">\n{self.svg}</g>\n'
        return self._svg(
            height, f"<style>{style()}</style>{textures()}{ground}{text(8, 22, self.name, 'heading')}{moved}"
        )

    def _svg(self, height: int, content: str) -> str:
        frame = f'xmlns="http://www.w3.org/2000/svg" class="lanes" viewBox="0 0 {self.width} {height}" role="img"'
        description = f"<title>{escape(self.name)}</title><desc>{escape(self.captions)}</desc>"
        return f"<svg {frame}>{description}\n{content}</svg>\n"


def picture(
    timeline: Timeline,
    view: View,
    predicted: tuple[Timeline, View] | None = None,
    captions: Sequence[str] = (),
    width: int = WIDTH,
) -> Picture:
    """Draw a view; a prediction of the same interval adds a track."""
    right = width - MARGIN
    columns = Columns(LEFT, right - LEFT, view.start, view.end)
    visible = VisibleEvents.of(timeline, view)
    rows, bottom = _rows(visible, predicted, columns)
    lines, ticks = axis(columns, TOP, bottom)
    explained, height = legend(_kinds(visible, columns), LEFT, right, bottom + 32)
    name = f"{view.title}: {view.place}, {duration(view.seconds)} {timeline.streams.source}"
    svg = "\n".join([*rows, lines, ticks, explained, ""])
    return Picture(name, " ".join(captions), svg, round(bottom + 32 + height + 4), width)


@dataclass(frozen=True)
class VisibleEvents:
    """Part of a timeline that lies in a view."""

    timeline: Timeline
    view: View
    by_stream: dict[StreamName, list[TimelineEvent]]
    waits: list[Wait]

    @classmethod
    def of(cls, timeline: Timeline, view: View) -> "VisibleEvents":
        start, end = view.start, view.end
        by_stream = {
            stream: [s for s in timeline.by_stream[stream] if s.end > start and s.start < end] for stream in STREAMS
        }
        return cls(timeline, view, by_stream, [w for w in timeline.waits if w.end > start and w.start < end])


def _rows(visible: VisibleEvents, predicted: tuple[Timeline, View] | None, columns: Columns) -> tuple[list[str], float]:
    """Return every row from the top, and where the last one ends."""
    timeline, view = visible.timeline, visible.view
    rows: list[str] = []
    y = float(TOP)
    for level in view.levels:
        inside = [r for r in timeline.ranges[level] if r.end > view.start and r.start < view.end]
        if inside and columns.count / len(inside) >= NARROWEST_RANGE:
            rows += [row_name(y, RANGE_HEIGHT - 2, f"{level.capitalize()}s"), range_row(inside, columns, y)]
            y += RANGE_HEIGHT
    y += GAP / 2
    for stream in timeline.shown_streams:
        height = HEIGHTS[stream]
        waits = visible.waits if stream == "compute" else []
        rows += [
            row_name(y, height, STREAM_LABELS[stream]),
            track_row(stream, visible.by_stream[stream], waits, columns, y, height),
        ]
        y += height + GAP / 2
        if stream == "compute" and predicted is not None and predicted[1].covers == view.covers:
            rows.append(_predicted_row(predicted, view, columns, y))
            y += PREDICTED_HEIGHT + GAP / 2
    y += GAP
    for stream in filter(timeline.has_amounts, timeline.shown_streams):
        rows.append(_rate_strip(visible, stream, columns, y))
        y += STRIP + GAP
    for samples, where in ((timeline.device_gib, "Device"), (timeline.host_gib, "Host")):
        if samples:
            rows.append(_memory_strip(samples, where, columns, y))
            y += STRIP + GAP
    return rows, y


def _predicted_row(predicted: tuple[Timeline, View], view: View, columns: Columns, y: float) -> str:
    """Draw the predicted compute track, from the same start and to the same scale; what is longer is cut off."""
    timeline, predicted_view = predicted
    shifted = Columns(columns.left, columns.count, predicted_view.start, predicted_view.start + view.seconds)
    visible = [s for s in VisibleEvents.of(timeline, predicted_view).by_stream["compute"] if s.start < shifted.end]
    return text(8, y + 12, "as predicted", "soft") + track_row("compute", visible, [], shifted, y, PREDICTED_HEIGHT)


def _rate_strip(visible: VisibleEvents, stream: StreamName, columns: Columns, y: float) -> str:
    """Draw TFLOP/s of compute or GB/s of a direction of the link, with the limit where it is known."""
    compute = stream == "compute"
    scale = 1e12 if compute else 1e9
    amounts = spread(((s.start, s.end, s.flops if compute else s.bytes) for s in visible.by_stream[stream]), columns)
    rates = [amount / columns.seconds_each / scale for amount in amounts]
    possible = visible.timeline.streams.peak_tflops if compute else _link(visible.timeline, stream)
    mean, unit = sum(rates) / len(rates), "TFLOP/s" if compute else "GB/s"
    name = row_name(y, STRIP, unit + DIRECTIONS[stream], f"mean {figures(mean)}")
    top = _top(max(rates)) if possible is None else 1.08 * max(*rates, possible)
    return name + strip_row(rates, top, possible, "rate", columns, y, STRIP)


def _link(timeline: Timeline, stream: StreamName) -> float | None:
    both = timeline.streams.link_gbs
    return None if both is None or stream in DISK_STREAMS else both[0 if stream == "inbound" else 1]


def _memory_strip(samples: Sequence[tuple[float, float]], where: str, columns: Columns, y: float) -> str:
    values = levels(samples, columns)
    peak = max((v for v in values if v is not None), default=None)
    name = row_name(y, STRIP, f"{where} GiB", "" if peak is None else f"most {figures(peak)}")
    return name + strip_row(values, _top(peak or 0.0), None, "memory", columns, y, STRIP)


def _top(highest: float) -> float:
    """Return the top of a strip's scale; one without activity still has a scale."""
    return ceiling(highest) if highest > 0 else 1.0


def _kinds(visible: VisibleEvents, columns: Columns) -> list[tuple[str, list[WorkKind]]]:
    """Return what the legend explains: only what is visible."""
    groups = []
    for label, streams in (("compute", STREAMS[:1]), ("copies", STREAMS[1:])):
        present = {(stream, s.name) for stream in streams for s in visible.by_stream[stream]}
        kinds: list[WorkKind] = []
        for stream, name in sorted(present, key=lambda work: (order(work)[1:], work)):
            if work_kind(stream, name) not in kinds:
                kinds.append(work_kind(stream, name))
        if label == "compute" and any(columns.width(w.start, w.end) >= NARROW for w in visible.waits):
            kinds.append(WAIT)
        if kinds:
            groups.append((label, kinds))
    return groups
