"""Plain text tables: columns as wide as their widest cell, numbers to the right, nothing that breaks in a pipe."""

from collections.abc import Iterable, Sequence
from typing import Any


def render(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with a header line; None is shown as a dash."""
    body = [[_cell(value) for value in row] for row in rows]
    right = [
        bool(body) and all(_is_number(row[i]) or row[i] == "-" for row in body) and any(_is_number(r[i]) for r in body)
        for i in range(len(header))
    ]
    widths = [max(len(header[i]), *(len(row[i]) for row in body), 0) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *body]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
    return "  ".join(padded).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) >= 10_000):
        return number(value)
    return " ".join(str(value).split())  # a newline in a name must not break the table


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("-", "").replace("%", "").strip().isdigit()


def number(value: float) -> str:
    """Format with four significant digits, thousands separated: 5.741, 91,339, 0.03345."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
