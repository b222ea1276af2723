"""Chart of a sweep's Pareto set as SVG text: tokens/s per GPU over tokens/s/user, without script or drawing library.

    pareto_chart(result) -> "<svg ...>"

Self-contained, for light and dark pages and for print. Variants differ in colour, in the shape of their markers and in
the dashes of their lines, so that none of these is needed alone. Filled markers are in the Pareto set of the sweep,
hollow ones are not, crosses are excluded; the knee has a ring. Labels are loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from llmb.perfmodel.tune.pareto import pareto_set
from llmb.report.sweep_table import describe_load, marks
from llmb.report.table import number
from llmb.report.timeline.svg_rows import CHARACTER, text
from llmb.report.timeline.svg_rows import number as coordinate
from llmb.report.timeline.svg_style import style
from llmb.results.sweep.sweep_points import LOAD_UNITS, SweepRow
from llmb.results.sweep.sweep_result import SweepResult

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 84, 936, 64, 516
MOST_TICKS = 7
RADIUS = 5.0
COLOURS = ("#2f6fbf", "#b8325a", "#3f8f46", "#c07a12", "#5b3486", "#23899b", "#7f8526", "#9a5a22")
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "1 4", "12 4", "6 2 1 2")
# Marker outlines around (0, 0), by variant: circle, square, triangle, diamond, ...
MARKERS = (
    "M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0Z", "M-4.5 -4.5H4.5V4.5H-4.5Z", "M0 -5.5L5.2 4H-5.2Z", "M0 -6L6 0L0 6L-6 0Z",
    "M0 5.5L5.2 -4H-5.2Z", "M-2 -5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z", "M-5 0L-2.5 -5H2.5L5 0L2.5 5H-2.5Z",
    "M0 -6L1.8 -1.8L6 0L1.8 1.8L0 6L-1.8 1.8L-6 0L-1.8 -1.8Z",
)  # fmt: skip
CROSS = "M-4 -4L4 4M-4 4L4 -4"


@dataclass(frozen=True)
class _Axes:
    """Scales from 0 to the first tick at or beyond the largest value."""

    x_step: float
    y_step: float
    x_ticks: int
    y_ticks: int

    @classmethod
    def up_to(cls, x: float, y: float) -> "_Axes":
        x_step, y_step = _step(x), _step(y)
        return cls(x_step, y_step, ceil(x / x_step), ceil(y / y_step))

    def place(self, x: float, y: float) -> tuple[float, float]:
        x_max, y_max = self.x_step * self.x_ticks, self.y_step * self.y_ticks
        return LEFT + (RIGHT - LEFT) * x / x_max, BOTTOM - (BOTTOM - TOP) * y / y_max


def _step(largest: float) -> float:
    """Return the distance of ticks: 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(largest / MOST_TICKS))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power * MOST_TICKS >= largest)


def pareto_chart(result: SweepResult) -> str:
    """Return the chart as an SVG document; without a point that has both figures it says so."""
    drawn = [i for i, row in enumerate(result.rows) if getattr(row, result.pareto_x) and getattr(row, result.pareto_y)]
    where = "per GPU" if result.gpus else "of the server"
    title = f"{result.target or result.name}: output tokens/s {where} by speed of one user"
    frame = f'xmlns="http://www.w3.org/2000/svg" class="lanes" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    body = _plot(result, drawn) if drawn else text(LEFT, 120, "no point has both figures", "soft")
    ground = f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
    return (
        f"<svg {frame}><title>{escape(title)}</title><desc>{escape(_description(result))}</desc>"
        f"<style>{style()}{_style()}</style>{ground}{_title(title)}{body}</svg>\n"
    )


def _title(title: str) -> str:
    """Draw the heading, smaller where it is long; a bold letter of a wide font (DejaVu Sans) is 0.66 em wide."""
    size = min(17.0, (WIDTH - 32) / len(title) / 0.66)
    return f'<text x="16" y="28" class="heading" style="font-size:{coordinate(size)}px">{escape(title)}</text>'


def _style() -> str:
    colours = "".join(
        f".v{i}{{--c:{colour};stroke-dasharray:{dash or 'none'}}}"
        for i, (colour, dash) in enumerate(zip(COLOURS, DASHES, strict=True))
    )
    return (
        f"{colours}.front{{fill:none;stroke:var(--c);stroke-width:1.8}}"
        ".set,.beyond,.bad{stroke:var(--c);stroke-width:1.6;stroke-dasharray:none}.set{fill:var(--c)}"
        ".beyond{fill:var(--paper)}.bad{fill:none;opacity:.7}"
        ".ring{fill:none;stroke:var(--ink);stroke-width:1.6}.frame{fill:none;stroke:var(--soft)}"
        ".lanes .label{font-size:11px;paint-order:stroke;stroke:var(--paper);stroke-width:3px}"
    )


def _plot(result: SweepResult, drawn: Sequence[int]) -> str:
    variants = list(dict.fromkeys(row.variant for row in result.rows))
    values = {i: _values(result, i) for i in drawn}
    axes = _Axes.up_to(max(x for x, _ in values.values()), max(y for _, y in values.values()))
    places = {i: axes.place(*value) for i, value in values.items()}
    parts = [_grid(axes, result)]
    for v, variant in enumerate(variants):
        usable = [i for i in drawn if result.rows[i].variant == variant and result.rows[i].excluded is None]
        parts.append(_front([places[usable[k]] for k in pareto_set([values[i] for i in usable])], v))
    taken = [(x - RADIUS - 1, y + 4, 2 * RADIUS + 2) for x, y in places.values()]  # by markers
    for i in drawn:
        parts.append(_marker(result, i, variants.index(result.rows[i].variant), *places[i]))
    for i in sorted(drawn, key=lambda i: (i != result.knee, i not in result.pareto, i)):
        parts.append(_label(result, i, *places[i], taken))
    return "".join([*parts, _legend(result, variants)])


def _values(result: SweepResult, i: int) -> tuple[float, float]:
    return getattr(result.rows[i], result.pareto_x), getattr(result.rows[i], result.pareto_y)


def _grid(axes: _Axes, result: SweepResult) -> str:
    lines, labels = [], []
    for k in range(axes.x_ticks + 1):
        x, _ = axes.place(k * axes.x_step, 0)
        lines.append(f"M{coordinate(x)} {TOP}V{BOTTOM}")
        labels.append(text(x, BOTTOM + 18, number(k * axes.x_step), "mid soft"))
    for k in range(axes.y_ticks + 1):
        _, y = axes.place(0, k * axes.y_step)
        lines.append(f"M{LEFT} {coordinate(y)}H{RIGHT}")
        labels.append(text(LEFT - 8, y + 4, number(k * axes.y_step), "end soft"))
    unit = "per GPU" if result.gpus is not None else "of the server"
    names = text((LEFT + RIGHT) / 2, BOTTOM + 38, "tokens/s/user (output tokens / E2E, waiting included)", "mid")
    names += text(16, 52, f"output tokens/s {unit}", "")
    frame = f'<path class="frame" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>'
    return f'<path class="grid" d="{"".join(lines)}"/>{frame}{"".join(labels)}{names}'


def _front(places: Sequence[tuple[float, float]], variant: int) -> str:
    if len(places) < 2:
        return ""
    path = "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in places)
    return f'<path class="front v{variant % len(COLOURS)}" d="M{path}"/>'


def _marker(result: SweepResult, i: int, variant: int, x: float, y: float) -> str:
    row = result.rows[i]
    excluded = row.excluded is not None
    kind = "bad" if excluded else "set" if i in result.pareto else "beyond"
    outline = CROSS if excluded else MARKERS[variant % len(MARKERS)]
    title = f"<title>{escape(_tooltip(result, i))}</title>"
    move = f'transform="translate({coordinate(x)} {coordinate(y)})"'
    ring = f'<circle class="ring" {move} r="{RADIUS + 5}"/>' if i == result.knee else ""
    return f'{ring}<path class="{kind} v{variant % len(COLOURS)}" {move} d="{outline}">{title}</path>'


def _tooltip(result: SweepResult, i: int) -> str:
    x, y = _values(result, i)
    row = result.rows[i]
    words = f"{describe_load(row)}: {number(y)} tokens/s, {number(x)} tokens/s/user"
    return f"{words}; {row.excluded or marks(result, i) or 'not in the Pareto set'}"


def _label(result: SweepResult, i: int, x: float, y: float, taken: list[tuple[float, float, float]]) -> str:
    """Draw the load beside its marker, right or left, wherever no other label is; none where all places are taken."""
    row = result.rows[i]
    special = [word for word in marks(result, i).split() if word not in ("Pareto", "excluded")]
    content = " ".join([f"{row.load:g}", *special])
    width = len(content) * CHARACTER
    for dx, dy, css in ((9, -7, ""), (-9, -7, "end"), (9, 15, ""), (-9, 15, "end")):
        start = x + dx - (width if css else 0)
        if start < LEFT or start + width > WIDTH - 4:
            continue
        if all(start + width < s or start > s + w or abs(y + dy - t) > 12 for s, t, w in taken):
            taken.append((start, y + dy, width))
            return text(x + dx, y + dy, content, f"label {css}".strip())
    return ""


def _legend(result: SweepResult, variants: Sequence[str]) -> str:
    """Draw what markers and lines mean."""
    y, x, parts = BOTTOM + 64, float(LEFT), []
    for v, variant in enumerate(variants):
        name = variant or f"labels: {result.rows[0].load_kind}, {LOAD_UNITS[result.rows[0].load_kind]}"
        css = f"v{v % len(COLOURS)}"
        parts.append(f'<path class="front {css}" d="M{coordinate(x)} {y - 4}h26"/>')
        move = f'transform="translate({coordinate(x + 13)} {y - 4})"'
        parts.append(f'<path class="set {css}" {move} d="{MARKERS[v % len(MARKERS)]}"/>{text(x + 33, y, name, "soft")}')
        x += 44 + len(name) * CHARACTER
        if x > RIGHT - 160:
            x, y = float(LEFT), y + 16
    key = "filled: Pareto set; hollow: not in it"
    key += "; ring: knee" if result.knee is not None else ""
    key += "; cross: excluded" if any(row.excluded for row in result.rows) else ""
    return "".join(parts) + text(RIGHT, 52, key, "end soft")


def _description(result: SweepResult) -> str:
    """Describe the chart for those who cannot see it: its Pareto set, point by point."""

    def point(row: SweepRow) -> str:
        x, y = getattr(row, result.pareto_x), getattr(row, result.pareto_y)
        return f"{describe_load(row)}: {number(y)} tokens/s, {number(x)} tokens/s/user"

    return "Pareto set: " + "; ".join(point(result.rows[i]) for i in result.pareto)
