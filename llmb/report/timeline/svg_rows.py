"""The rows of a picture of the lanes, as SVG text: named ranges, lanes of work, strips of rates and memory, the axis.

Each row is given its top and draws itself inside the columns; its name stands to the left. A lane whose stretches are
mostly narrower than two columns is drawn by columns: the height of a colour is its share of the column's time.
"""

from collections.abc import Sequence
from html import escape
from statistics import median

from llmb.perfmodel.offload.stream_timeline import Lane, Stretch
from llmb.report.timeline.axis_units import duration, figures, marks, size
from llmb.report.timeline.named_ranges import Range
from llmb.report.timeline.pixel_columns import Columns, runs, spread, stacked
from llmb.report.timeline.task_kinds import WAIT, Kind, kind, order
from llmb.report.timeline.tracks import Wait

CHARACTER = 6.9  # width of one, on the safe side, in the 11 to 12 pixel fonts used
RANGE_HEIGHT = 20
SEAM = 4.0  # pixels, from which a seam keeps neighbours apart
LABELLED = 20  # pixels of height, from which stretches bear labels
MOST_TITLES = 500  # stretches of a lane that each get a title of their own
NARROW = 2.0  # pixels, below which stretches are drawn by columns
NARROWEST = 0.7  # pixels, as which a stretch drawn by itself is still seen


def number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel, as short as it gets."""
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
    """The longest of these that fits, or nothing."""
    return next((label for label in labels if len(label) * CHARACTER + 6 <= width), "")


def _box(one: Range | Stretch | Wait, columns: Columns, top: float, height: float) -> tuple[str, float]:
    """Where something lies, as the attributes of a rectangle that can be seen, and the middle of it."""
    width = max(columns.width(one.start, one.end), NARROWEST)
    x = min(columns.x(one.start), columns.left + columns.count - width)
    return f'x="{number(x)}" y="{number(top)}" width="{number(width)}" height="{number(height)}"', x + width / 2


def range_row(shown: Sequence[Range], columns: Columns, top: float) -> str:
    """Neighbours in two shades, so that borders are seen; the name and the duration where they fit."""
    forms = [_forms(one, columns) for one in shown]
    widths = [columns.width(one.start, one.end) for one in shown]
    numbered = shown[0].level != "phase"
    shortest = _form_for_all(forms, widths) if numbered else 0
    parts = []
    for i, (one, labels, width) in enumerate(zip(shown, forms, widths, strict=True)):
        box, middle = _box(one, columns, top, RANGE_HEIGHT - 2)
        seam = " seam" if width >= SEAM else ""
        title = f"<title>{escape(one.labels[0])}: {duration(one.end - one.start)}</title>"
        parts.append(f'<rect class="range{"2" if i % 2 else ""}{seam}" {box}>{title}</rect>')
        label = fitting(labels[shortest:], width)
        if label:
            parts.append(text(middle, top + 13, label, "mid"))
    return "".join(parts)


def _forms(one: Range, columns: Columns) -> list[str]:
    """What may be written on a range, the longest first; the time it took only where the picture shows all of it."""
    whole = one.start >= columns.start and one.end <= columns.end
    took = f"{one.labels[0]}: {duration(one.end - one.start)}"
    return [took if whole else one.labels[0], *one.labels]


def _form_for_all(forms: Sequence[Sequence[str]], widths: Sequence[float]) -> int:
    """The longest form that fits all ranges with room for any: a row reads better in one form."""
    fits = [
        next((i for i, label in enumerate(labels) if fitting([label], width)), None)
        for labels, width in zip(forms, widths, strict=True)
    ]
    return max((i for i in fits if i is not None), default=0)


def _track(columns: Columns, top: float, height: float) -> str:
    box = f'x="{columns.left}" y="{number(top)}" width="{columns.count}" height="{number(height)}"'
    return f'<rect class="track" {box}/>'


def lane_row(
    lane: Lane, shown: Sequence[Stretch], waits: Sequence[Wait], columns: Columns, top: float, height: float
) -> str:
    """A lane of work on its track."""
    track = _track(columns, top, height)
    if not shown:
        return track
    if median(columns.width(s.start, s.end) for s in shown) < NARROW:
        return track + _by_columns(lane, shown, columns, top, height)
    stretches = "".join(_stretch(s, columns, top, height, len(shown) <= MOST_TITLES) for s in shown)
    return track + stretches + "".join(_wait(w, columns, top, height) for w in waits)


def _by_columns(lane: Lane, shown: Sequence[Stretch], columns: Columns, top: float, height: float) -> str:
    names = sorted({s.name for s in shown}, key=lambda name: order((lane, name)))
    each = columns.seconds_each
    times = [spread(((s.start, s.end, s.end - s.start) for s in shown if s.name == name), columns) for name in names]
    layers = stacked([[seconds / each for seconds in row] for row in times], height)
    parts = []
    for name, bars in zip(names, layers, strict=True):
        path = "".join(
            f"M{columns.left + first} {number(top + height - high)}h{count}v{number(high - low)}h-{count}z"
            for first, count, low, high in _merged(bars)
        )
        title = f"<title>{escape(kind(lane, name).label)}</title>"
        parts.append(f'<path class="columns {kind(lane, name).css_class}" d="{path}">{title}</path>' if path else "")
    return "".join(parts)


def _merged(bars: Sequence[tuple[int, float, float]]) -> list[tuple[int, int, float, float]]:
    """Neighbouring columns with the same bar as one: (first, count, from, to)."""
    found: list[tuple[int, int, float, float]] = []
    for column, low, high in bars:
        if found and found[-1][0] + found[-1][1] == column and found[-1][2:] == (low, high):
            found[-1] = (found[-1][0], found[-1][1] + 1, low, high)
        else:
            found.append((column, 1, low, high))
    return found


def _stretch(stretch: Stretch, columns: Columns, top: float, height: float, titled: bool) -> str:
    box, middle = _box(stretch, columns, top, height)
    width = columns.width(stretch.start, stretch.end)
    look = kind(stretch.lane, stretch.name)
    title = f"<title>{escape(describe(stretch))}</title>" if titled else ""
    label = fitting(_labels(stretch, look), width) if height >= LABELLED else ""
    ink = "mid on-pale" if look.pale else "mid on"
    written = text(middle, top + height / 2 + 4, label, ink) if label else ""
    seam = " seam" if width >= SEAM else ""
    return f'<rect class="{look.css_class}{seam}" {box}>{title}</rect>{written}'


def _labels(stretch: Stretch, look: Kind) -> list[str]:
    """A copy says its layer, as it runs ahead of the ranges above; compute stands right below its own."""
    if stretch.lane == "compute" or stretch.layer is None:
        return [look.label, look.short]
    return [f"{look.label} {stretch.layer}", look.label, f"{stretch.layer}"]


def _wait(wait: Wait, columns: Columns, top: float, height: float) -> str:
    if columns.width(wait.start, wait.end) < NARROW:
        return ""
    cause = "with no copy that ends with it" if wait.copy is None else f"for {describe(wait.copy)}"
    box, _ = _box(wait, columns, top, height)
    title = f"<title>waits {duration(wait.end - wait.start)} {escape(cause)}</title>"
    return f'<rect class="{WAIT.css_class}" {box}>{title}</rect>'


def describe(stretch: Stretch) -> str:
    """One stretch in words: what, of which layer and chunk, how long, how fast."""
    places = [
        f"{word} {value}" for word, value in (("layer", stretch.layer), ("chunk", stretch.chunk)) if value is not None
    ]
    took = stretch.end - stretch.start
    direction = {"compute": "", "inbound": " in", "outbound": " out"}[stretch.lane]
    rate = ""
    if took > 0 and stretch.flops:
        rate = f", {figures(stretch.flops / took / 1e12)} TFLOP/s"
    elif took > 0 and stretch.bytes:
        rate = f", {size(stretch.bytes)} at {figures(stretch.bytes / took / 1e9)} GB/s"
    return f"{', '.join([kind(stretch.lane, stretch.name).label + direction, *places])}: {duration(took)}{rate}"


def strip_row(
    values: Sequence[float | None],
    highest: float,
    limit: float | None,
    css_class: str,
    columns: Columns,
    top: float,
    height: float,
) -> str:
    """A filled curve on its track, `highest` at the top, and a dashed line at what would be possible."""
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
    """Grid lines through the rows, and their numbers below them."""
    seconds = columns.end - columns.start
    chosen = marks(seconds)
    lines, labels = [], []
    for value in chosen.up_to(seconds):
        x = columns.x(columns.start + value)
        lines.append(f"M{number(x)} {number(top)}V{number(bottom + 5)}")
        labels.append(text(x, bottom + 18, chosen.label(value), "mid soft tick"))
    unit = text(8, bottom + 18, f"time, {chosen.unit}", "soft")
    return f'<path class="grid" d="{"".join(lines)}"/>', "".join([*labels, unit])


def legend(kinds: Sequence[tuple[str, Sequence[Kind]]], left: float, right: float, top: float) -> tuple[str, float]:
    """Swatches by lane, wrapped where a line is full; with the height it takes."""
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
