"""Rows of a picture as SVG text: named ranges, tracks of work, strips of rates and memory, the axis.

Each row is given its top and draws itself inside the columns; its name is to the left. A track whose events are mostly
narrower than two columns is drawn by columns: the height of a colour is its fraction of the column's time.
"""

from collections.abc import Sequence
from html import escape
from statistics import median

from llmb.perfmodel.offload.stream_timeline import StreamName, TimelineEvent
from llmb.report.timeline.axis_units import duration, figures, marks, size
from llmb.report.timeline.named_ranges import NamedRange
from llmb.report.timeline.pixel_columns import Columns, runs, spread, stacked
from llmb.report.timeline.task_kinds import DIRECTIONS, WAIT, WorkKind, order, work_kind
from llmb.report.timeline.tracks import Wait

CHARACTER = 6.9  # width of one, on the safe side, in the 11 to 12 pixel fonts used
RANGE_HEIGHT = 20
SEAM = 4.0  # pixels, from which a seam keeps neighbours apart
LABELLED = 20  # pixels of height, from which events have labels
MOST_TITLES = 500  # events of a track that each get a title of their own
NARROW = 2.0  # pixels, below which events are drawn by columns
NARROWEST = 0.7  # pixels, as which an event drawn by itself is still visible


def number(value: float) -> str:
    """Format a coordinate, to a hundredth of a pixel, as short as possible."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, content: str, css_class: str = "") -> str:
    named = f' class="{css_class}"' if css_class else ""
    return f'<text x="{number(x)}" y="{number(y)}"{named}>{escape(content)}</text>'


def row_name(top: float, height: float, name: str, detail: str = "") -> str:
    middle = top + height / 2
    if not detail:
        return text(8, middle + 4, name, "name")
    return text(8, middle - 3, name, "name") + text(8, middle + 12, detail, "soft")


def fitting(labels: Sequence[str], width: float) -> str:
    """Return the longest of these that fits, or nothing."""
    return next((label for label in labels if len(label) * CHARACTER + 6 <= width), "")


def _box(item: NamedRange | TimelineEvent | Wait, columns: Columns, top: float, height: float) -> tuple[str, float]:
    """Return the attributes of a visible rectangle, and its middle."""
    width = max(columns.width(item.start, item.end), NARROWEST)
    x = min(columns.x(item.start), columns.left + columns.count - width)
    return f'x="{number(x)}" y="{number(top)}" width="{number(width)}" height="{number(height)}"', x + width / 2


def range_row(visible: Sequence[NamedRange], columns: Columns, top: float) -> str:
    """Draw neighbours in two shades, so that boundaries are visible; the name and the duration where they fit."""
    labels_of_ranges = [_range_labels(item, columns) for item in visible]
    widths = [columns.width(item.start, item.end) for item in visible]
    numbered = visible[0].level != "phase"
    shortest = _index_for_all(labels_of_ranges, widths) if numbered else 0
    parts = []
    for i, (item, labels, width) in enumerate(zip(visible, labels_of_ranges, widths, strict=True)):
        box, middle = _box(item, columns, top, RANGE_HEIGHT - 2)
        seam = " seam" if width >= SEAM else ""
        title = f"<title>{escape(item.labels[0])}: {duration(item.end - item.start)}</title>"
        parts.append(f'<rect class="range{"2" if i % 2 else ""}{seam}" {box}>{title}</rect>')
        label = fitting(labels[shortest:], width)
        if label:
            parts.append(text(middle, top + 13, label, "mid"))
    return "".join(parts)


def _range_labels(item: NamedRange, columns: Columns) -> list[str]:
    """Return the possible labels of a range, the longest first; the duration only where the picture shows all of it."""
    whole = item.start >= columns.start and item.end <= columns.end
    seconds = f"{item.labels[0]}: {duration(item.end - item.start)}"
    return [seconds if whole else item.labels[0], *item.labels]


def _index_for_all(labels_of_ranges: Sequence[Sequence[str]], widths: Sequence[float]) -> int:
    """Return the index of the longest label that fits all ranges wide enough for any: a row has labels of one kind."""
    fits = [
        next((i for i, label in enumerate(labels) if fitting([label], width)), None)
        for labels, width in zip(labels_of_ranges, widths, strict=True)
    ]
    return max((i for i in fits if i is not None), default=0)


def _track(columns: Columns, top: float, height: float) -> str:
    box = f'x="{columns.left}" y="{number(top)}" width="{columns.count}" height="{number(height)}"'
    return f'<rect class="track" {box}/>'


def track_row(
    stream: StreamName,
    visible: Sequence[TimelineEvent],
    waits: Sequence[Wait],
    columns: Columns,
    top: float,
    height: float,
) -> str:
    """Draw the events of a stream on its track."""
    track = _track(columns, top, height)
    if not visible:
        return track
    if median(columns.width(s.start, s.end) for s in visible) < NARROW:
        return track + _by_columns(stream, visible, columns, top, height)
    events = "".join(_event(s, columns, top, height, len(visible) <= MOST_TITLES) for s in visible)
    return track + events + "".join(_wait(w, columns, top, height) for w in waits)


def _by_columns(
    stream: StreamName, visible: Sequence[TimelineEvent], columns: Columns, top: float, height: float
) -> str:
    names = sorted({s.name for s in visible}, key=lambda name: order((stream, name)))
    each = columns.seconds_each
    times = [spread(((s.start, s.end, s.end - s.start) for s in visible if s.name == name), columns) for name in names]
    layers = stacked([[seconds / each for seconds in row] for row in times], height)
    parts = []
    for name, bars in zip(names, layers, strict=True):
        path = "".join(
            f"M{columns.left + first} {number(top + height - high)}h{count}v{number(high - low)}h-{count}z"
            for first, count, low, high in _merged(bars)
        )
        title = f"<title>{escape(work_kind(stream, name).label)}</title>"
        parts.append(
            f'<path class="columns {work_kind(stream, name).css_class}" d="{path}">{title}</path>' if path else ""
        )
    return "".join(parts)


def _merged(bars: Sequence[tuple[int, float, float]]) -> list[tuple[int, int, float, float]]:
    """Merge neighbouring columns with the same bar: (first, count, from, to)."""
    merged: list[tuple[int, int, float, float]] = []
    for column, low, high in bars:
        if merged and merged[-1][0] + merged[-1][1] == column and merged[-1][2:] == (low, high):
            merged[-1] = (merged[-1][0], merged[-1][1] + 1, low, high)
        else:
            merged.append((column, 1, low, high))
    return merged


def _event(event: TimelineEvent, columns: Columns, top: float, height: float, titled: bool) -> str:
    box, middle = _box(event, columns, top, height)
    width = columns.width(event.start, event.end)
    kind = work_kind(event.stream, event.name)
    title = f"<title>{escape(describe(event))}</title>" if titled else ""
    label = fitting(_labels(event, kind), width) if height >= LABELLED else ""
    ink = "mid on-pale" if kind.pale else "mid on"
    label_text = text(middle, top + height / 2 + 4, label, ink) if label else ""
    seam = " seam" if width >= SEAM else ""
    return f'<rect class="{kind.css_class}{seam}" {box}>{title}</rect>{label_text}'


def _labels(event: TimelineEvent, kind: WorkKind) -> list[str]:
    """Return labels; a copy has its layer, as it runs ahead of the ranges above, compute is right below its range."""
    if event.stream == "compute" or event.layer is None:
        return [kind.label, kind.short]
    return [f"{kind.label} {event.layer}", kind.label, f"{event.layer}"]


def _wait(wait: Wait, columns: Columns, top: float, height: float) -> str:
    if columns.width(wait.start, wait.end) < NARROW:
        return ""
    cause = "with no copy that ends with it" if wait.copy is None else f"for {describe(wait.copy)}"
    box, _ = _box(wait, columns, top, height)
    title = f"<title>waits {duration(wait.end - wait.start)} {escape(cause)}</title>"
    return f'<rect class="{WAIT.css_class}" {box}>{title}</rect>'


def describe(event: TimelineEvent) -> str:
    """Describe one event: what, of which layer and chunk, how long, how fast."""
    places = [
        f"{word} {value}" for word, value in (("layer", event.layer), ("chunk", event.chunk)) if value is not None
    ]
    seconds = event.end - event.start
    rate = ""
    if seconds > 0 and event.flops:
        rate = f", {figures(event.flops / seconds / 1e12)} TFLOP/s"
    elif seconds > 0 and event.bytes:
        rate = f", {size(event.bytes)} at {figures(event.bytes / seconds / 1e9)} GB/s"
    label = work_kind(event.stream, event.name).label + DIRECTIONS[event.stream]
    return f"{', '.join([label, *places])}: {duration(seconds)}{rate}"


def strip_row(
    values: Sequence[float | None],
    highest: float,
    limit: float | None,
    css_class: str,
    columns: Columns,
    top: float,
    height: float,
) -> str:
    """Draw a filled curve on its track, `highest` at the top, and a dashed line at the limit."""
    bars = runs([None if v is None else v / highest * height for v in values])
    bottom = top + height
    path = "".join(
        f"M{columns.left + first} {number(bottom - value)}h{count}V{number(bottom)}h-{count}z"
        for first, count, value in bars
        if value > 0
    )
    parts = [
        _track(columns, top, height),
        f'<path class="columns {css_class}" d="{path}"/>' if path else "",
        text(columns.left - 6, bottom, "0", "soft end"),
    ]
    marked = bottom - (limit or highest) / highest * height
    parts.append(text(columns.left - 6, max(marked + 4, top + 8), f"{limit or highest:,.4g}", "soft end"))
    if limit is not None:
        parts.append(f'<path class="limit" d="M{columns.left} {number(marked)}h{columns.count}"/>')
    return "".join(parts)


def axis(columns: Columns, top: float, bottom: float) -> tuple[str, str]:
    """Draw grid lines through the rows, and their labels below them."""
    seconds = columns.end - columns.start
    chosen = marks(seconds)
    lines, labels = [], []
    for value in chosen.up_to(seconds):
        x = columns.x(columns.start + value)
        lines.append(f"M{number(x)} {number(top)}V{number(bottom + 5)}")
        labels.append(text(x, bottom + 18, chosen.label(value), "mid soft tick"))
    unit = text(8, bottom + 18, f"time, {chosen.unit}", "soft")
    return f'<path class="grid" d="{"".join(lines)}"/>', "".join([*labels, unit])


def legend(kinds: Sequence[tuple[str, Sequence[WorkKind]]], left: float, right: float, top: float) -> tuple[str, float]:
    """Draw swatches by group, wrapped where a line is full; returns its height, too."""
    parts, y = [], top
    for group, members in kinds:
        x = left
        parts.append(text(8, y + 10, group, "soft"))
        for member in members:
            width = 28 + len(member.label) * CHARACTER
            if x + width > right:
                x, y = left, y + 20
            parts.append(f'<rect class="{member.css_class}" x="{number(x)}" y="{number(y)}" width="18" height="12"/>')
            parts.append(text(x + 23, y + 10, member.label))
            x += width + 10
        y += 20
    return "".join(parts), y - top
