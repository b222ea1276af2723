"""One picture of the lanes as SVG text, written by hand: no drawing library, no script, same bytes for same data.

    picture(timeline, view).alone() -> "<svg ...>"

From the top: named ranges, what the GPU computes, what is copied in and out, then strips of TFLOP/s, of GB/s on the
link and of memory in use, all over one time axis. A prediction of the same span adds its compute lane below the own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from llmb.perfmodel.offload.stream_timeline import LANES, Lane, Stretch
from llmb.report.timeline.axis_units import ceiling, duration, figures
from llmb.report.timeline.pixel_columns import Columns, levels, spread
from llmb.report.timeline.svg_rows import (
    NARROW,
    RANGE_HEIGHT,
    axis,
    lane_row,
    legend,
    range_row,
    row_name,
    strip_row,
    text,
)
from llmb.report.timeline.svg_style import style, textures
from llmb.report.timeline.task_kinds import LANE_LABELS, WAIT, Kind, kind, order
from llmb.report.timeline.tracks import Timeline, Wait
from llmb.report.timeline.views import View

WIDTH = 1200
LEFT, RIGHT = 156, 1186  # of the columns
HEIGHTS: dict[Lane, int] = {"compute": 36, "inbound": 26, "outbound": 26}
PREDICTED_HEIGHT = 16
STRIP = 36
GAP = 8
TOP = 4
HEADING = 32  # of a picture in a file of its own
NARROWEST_RANGE = 3.0  # pixels on average, below which a level of ranges is left out


@dataclass(frozen=True)
class Picture:
    """What is drawn, to be put on a page or into a file of its own."""

    name: str
    words: str
    drawn: str
    height: int

    def on_page(self) -> str:
        """A page has the style and the textures once for all, and a heading of its own."""
        return self._svg(self.height, self.drawn)

    def alone(self) -> str:
        """With all that it needs."""
        height = self.height + HEADING
        ground = f'<rect class="paper" width="{WIDTH}" height="{height}"/>'
        moved = f'<g transform="translate(0 {HEADING})">\n{self.drawn}</g>\n'
        return self._svg(
            height, f"<style>{style()}</style>{textures()}{ground}{text(8, 22, self.name, 'heading')}{moved}"
        )

    def _svg(self, height: int, content: str) -> str:
        frame = f'xmlns="http://www.w3.org/2000/svg" class="lanes" viewBox="0 0 {WIDTH} {height}" role="img"'
        told = f"<title>{escape(self.name)}</title><desc>{escape(self.words)}</desc>"
        return f"<svg {frame}>{told}\n{content}</svg>\n"


def picture(
    timeline: Timeline, view: View, predicted: tuple[Timeline, View] | None = None, words: Sequence[str] = ()
) -> Picture:
    """Draw a view; a prediction of the same span adds a row."""
    columns = Columns(LEFT, RIGHT - LEFT, view.start, view.end)
    shown = Shown.of(timeline, view)
    rows, bottom = _rows(shown, predicted, columns)
    lines, ticks = axis(columns, TOP, bottom)
    explained, height = legend(_kinds(shown, columns), LEFT, RIGHT, bottom + 32)
    name = f"{view.title}: {view.place}, {duration(view.seconds)} {timeline.lanes.source}"
    drawn = "\n".join([*rows, lines, ticks, explained, ""])
    return Picture(name, " ".join(words), drawn, round(bottom + 32 + height + 4))


@dataclass(frozen=True)
class Shown:
    """The part of a timeline that lies in a view."""

    timeline: Timeline
    view: View
    of_lane: dict[Lane, list[Stretch]]
    waits: list[Wait]

    @classmethod
    def of(cls, timeline: Timeline, view: View) -> "Shown":
        start, end = view.start, view.end
        of_lane = {lane: [s for s in timeline.of_lane[lane] if s.end > start and s.start < end] for lane in LANES}
        return cls(timeline, view, of_lane, [w for w in timeline.waits if w.end > start and w.start < end])


def _rows(shown: Shown, predicted: tuple[Timeline, View] | None, columns: Columns) -> tuple[list[str], float]:
    """Every row from the top, and where the last one ends."""
    timeline, view = shown.timeline, shown.view
    rows: list[str] = []
    y = float(TOP)
    for level in view.levels:
        inside = [r for r in timeline.ranges[level] if r.end > view.start and r.start < view.end]
        if inside and columns.count / len(inside) >= NARROWEST_RANGE:
            rows += [row_name(y, RANGE_HEIGHT - 2, f"{level.capitalize()}s"), range_row(inside, columns, y)]
            y += RANGE_HEIGHT
    y += GAP / 2
    for lane in LANES:
        height = HEIGHTS[lane]
        waits = shown.waits if lane == "compute" else []
        rows += [row_name(y, height, LANE_LABELS[lane]), lane_row(lane, shown.of_lane[lane], waits, columns, y, height)]
        y += height + GAP / 2
        if lane == "compute" and predicted is not None and predicted[1].covers == view.covers:
            rows.append(_predicted_row(predicted, view, columns, y))
            y += PREDICTED_HEIGHT + GAP / 2
    y += GAP
    for lane in filter(timeline.counts, LANES):
        rows.append(_rate_strip(shown, lane, columns, y))
        y += STRIP + GAP
    for samples, where in ((timeline.device_gib, "Device"), (timeline.host_gib, "Host")):
        if samples:
            rows.append(_memory_strip(samples, where, columns, y))
            y += STRIP + GAP
    return rows, y


def _predicted_row(predicted: tuple[Timeline, View], view: View, columns: Columns, y: float) -> str:
    """The compute lane as foreseen, from the same start and to the same scale; what is longer is cut off."""
    timeline, other = predicted
    shifted = Columns(columns.left, columns.count, other.start, other.start + view.seconds)
    shown = [s for s in Shown.of(timeline, other).of_lane["compute"] if s.start < shifted.end]
    return text(8, y + 12, "as predicted", "soft") + lane_row("compute", shown, [], shifted, y, PREDICTED_HEIGHT)


def _rate_strip(shown: Shown, lane: Lane, columns: Columns, y: float) -> str:
    """TFLOP/s of compute or GB/s of a direction of the link, with what is possible where that is known."""
    compute = lane == "compute"
    scale = 1e12 if compute else 1e9
    amounts = spread(((s.start, s.end, s.flops if compute else s.bytes) for s in shown.of_lane[lane]), columns)
    rates = [amount / columns.seconds_each / scale for amount in amounts]
    possible = shown.timeline.lanes.peak_tflops if compute else _link(shown.timeline, lane)
    mean, unit = sum(rates) / len(rates), "TFLOP/s" if compute else "GB/s"
    name = row_name(
        y, STRIP, unit if compute else f"{unit} {'in' if lane == 'inbound' else 'out'}", f"mean {figures(mean)}"
    )
    top = _top(max(rates)) if possible is None else 1.08 * max(*rates, possible)
    return name + strip_row(rates, top, possible, "rate", columns, y, STRIP)


def _link(timeline: Timeline, lane: Lane) -> float | None:
    both = timeline.lanes.link_gbs
    return None if both is None else both[0 if lane == "inbound" else 1]


def _memory_strip(samples: Sequence[tuple[float, float]], where: str, columns: Columns, y: float) -> str:
    values = levels(samples, columns)
    peak = max((v for v in values if v is not None), default=None)
    name = row_name(y, STRIP, f"{where} GiB", "" if peak is None else f"most {figures(peak)}")
    return name + strip_row(values, _top(peak or 0.0), None, "memory", columns, y, STRIP)


def _top(highest: float) -> float:
    """The top of a strip's scale; one where nothing happens still has a scale."""
    return ceiling(highest) if highest > 0 else 1.0


def _kinds(shown: Shown, columns: Columns) -> list[tuple[str, list[Kind]]]:
    """What the legend explains: only what is there to be seen."""
    groups = []
    for label, lanes in (("compute", LANES[:1]), ("copies", LANES[1:])):
        present = {(lane, s.name) for lane in lanes for s in shown.of_lane[lane]}
        found: list[Kind] = []
        for lane, name in sorted(present, key=lambda work: (order(work)[1:], work)):
            if kind(lane, name) not in found:
                found.append(kind(lane, name))
        if label == "compute" and any(columns.width(w.start, w.end) >= NARROW for w in shown.waits):
            found.append(WAIT)
        if found:
            groups.append((label, found))
    return groups
