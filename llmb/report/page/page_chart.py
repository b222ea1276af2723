"""Charts of a page as Plotly figures in plain data: traces, layout, and the sentences under the picture.

Series differ in colour and also in dash, marker or pattern, so that none of these is needed alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite
from typing import Any

from llmb.report.page.thinning import Thinned, thin

COLOURS = ("#2f6fbf", "#b8325a", "#3f8f46", "#c07a12", "#7a4fb0", "#23899b", "#7f8526", "#9a5a22")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
PATTERNS = ("", "/", "x", ".", "-", "|", "+", "\\")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "hexagon", "star")
GREY = "#7c8490"
DIGITS = 6  # significant, of a number in a chart

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture of a page."""

    name: str  # unique on the page: letters, digits and hyphens
    title: str
    traces: Sequence[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    captions: Sequence[str] = ()
    height: int = 300
    whole: bool = False  # takes the page's whole width


def plain(text: object) -> str:
    """Return text for a label: Plotly interprets some HTML tags."""
    return escape(str(text), quote=False)


def values(numbers: Iterable[float | None]) -> list[float | None]:
    """Return numbers for JSON: few digits, and null for what is not finite."""
    return [None if x is None or not isfinite(x) else float(f"{x:.{DIGITS}g}") for x in numbers]


def fill(index: int) -> dict[str, Any]:
    """Return the marker of bars: a colour and a pattern."""
    shape = PATTERNS[index % len(PATTERNS)]
    return {"color": COLOURS[index % len(COLOURS)], "pattern": pattern(shape), "line": {"width": 0}}


def pattern(shape: str | list[str]) -> dict[str, Any]:
    """Return the white pattern over the colour of a bar, or of each bar."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "fgopacity": 0.55, "size": 6, "solidity": 0.25}


def series(
    name: str, x: Sequence[float], y: Sequence[float], index: int = 0, hover: str = "%{y:.5g}", dashed: bool = False
) -> list[Trace]:
    """Return a line; of a long series the median of bins, in a band from their smallest to their largest value."""
    return thinned_series(name, thin(x, y), index, hover, dashed)


def thinned_series(
    name: str, bins: Thinned, index: int = 0, hover: str = "%{y:.5g}", dashed: bool = False
) -> list[Trace]:
    """Return the line of a series, and its band where it was thinned; `dashed`: one of several in a chart."""
    dash = DASHES[index % len(DASHES)] if dashed else "solid"
    colour, label = COLOURS[index % len(COLOURS)], plain(name)
    line = {
        "type": "scatter", "mode": "lines" if len(bins.x) > 1 else "markers", "name": label, "x": values(bins.x),
        "y": values(bins.middle), "line": {"color": colour, "width": 1.6, "dash": dash},
        "hovertemplate": f"{label} {hover}<extra></extra>",
    }  # fmt: skip
    if bins.per_bin == 1:
        return [line]
    edge = {"type": "scatter", "mode": "lines", "x": line["x"], "showlegend": False, "line": {"width": 0}}
    band = {"fill": "tonexty", "fillcolor": f"{colour}44"}
    high = {**edge, "y": values(bins.high), **band, "hovertemplate": "largest %{y:.5g}<extra></extra>"}
    low = {**edge, "y": values(bins.low), "hovertemplate": "smallest %{y:.5g}<extra></extra>"}
    return [low, high, line]


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": title}, **options}


def horizontal_line(
    y: float, label: str, dash: str = "dash", left: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a line across the chart and its label at one end, as a shape and an annotation."""
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"dash": dash, "width": 1}}
    end = {"x": 0, "xanchor": "left"} if left else {"x": 1, "xanchor": "right"}
    note = {"xref": "paper", **end, "y": y, "yanchor": "bottom", "text": plain(label)}
    return shape, note


def vertical_line(x: float, label: str, level: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a line up the chart and its label at the top; `level`: 0 is the highest row of labels."""
    shape = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": {"dash": "dash", "width": 1}}
    note = {"yref": "paper", "y": 1 - 0.1 * level, "yanchor": "top", "x": x, "xanchor": "left", "text": plain(label)}
    return shape, note


def shaded(start: float, end: float) -> dict[str, Any]:
    """Return a shape that marks an interval of the x axis."""
    place = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": start, "x1": end, "layer": "below"}
    return {**place, "fillcolor": COLOURS[0], "opacity": 0.09, "line": {"width": 0}}
