"""Plain text tables: columns as wide as their widest cell, numbers to the right, nothing that breaks in a pipe.

    render(("workload", "sizes"), rows)                           within the terminal; in a pipe one line a row
    render(("size", "gpu", "seqlen", ...), rows, 80, keys=2)      within 80 columns; None: however long

Within a width nothing is cut: cells break at spaces, headers after underscores, and columns for which there is still no
space continue in a second table below, which repeats the first `keys` columns.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

GAP = "  "  # between columns


def terminal_width() -> int | None:
    """Return the width of $COLUMNS or of the terminal; None for a pipe or a file, which takes lines of any length."""
    has_width = os.environ.get("COLUMNS", "").isdigit() or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if has_width else None


def render(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    width: int | Literal["terminal"] | None = "terminal",
    keys: int = 1,
) -> str:
    """Return a table with a header line; None is shown as a dash."""
    width = terminal_width() if width == "terminal" else width
    body = [[_cell(value) for value in row] for row in rows]
    columns = [_Column(title, [row[i] for row in body]) for i, title in enumerate(header)]
    blocks = [columns] if width is None else _blocks(columns, width, keys)
    return "\n\n".join(_block(block, width, keys) for block in blocks)


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[str]

    @property
    def is_numeric(self) -> bool:
        numbers = [_is_number(cell) for cell in self.cells]
        return any(numbers) and all(n or cell == "-" for n, cell in zip(numbers, self.cells, strict=True))

    @property
    def width(self) -> int:
        """Width without line breaks."""
        return max(map(len, (self.title, *self.cells)))

    @property
    def least_width(self) -> int:
        """Width with a line break wherever one is possible."""
        return self.wrapped(0).width

    def wrapped(self, limit: int) -> "_Wrapped":
        """Break title and cells into lines of at most `limit` characters, or single words."""
        return _Wrapped(_fill(_title_parts(self.title), "", limit), [_fill(c.split(), " ", limit) for c in self.cells])


@dataclass(frozen=True)
class _Wrapped:
    """Lines of a column's title and of each of its cells."""

    title: list[str]
    cells: list[list[str]]

    @property
    def width(self) -> int:
        return max((len(line) for lines in (self.title, *self.cells) for line in lines), default=0)

    @property
    def heights(self) -> list[int]:
        return [len(lines) for lines in (self.title, *self.cells)]


def _title_parts(title: str) -> list[str]:
    return re.split(r"(?<=_)(?=..)", title)  # a unit of one letter stays where it is: limit_s


def _total(widths: Iterable[int]) -> int:
    return sum(width + len(GAP) for width in widths) - len(GAP)


def _blocks(columns: list[_Column], width: int, keys: int) -> list[list[_Column]]:
    """Split columns into blocks that fit the width, each with the key columns first."""
    blocks = [columns[:keys]]
    for column in columns[keys:]:
        if len(blocks[-1]) > keys and _total(c.least_width for c in (*blocks[-1], column)) > width:
            blocks.append(columns[:keys])
        blocks[-1] = [*blocks[-1], column]
    return blocks


def _block(columns: list[_Column], limit: int | None, keys: int) -> str:
    """Return one table of these columns; key columns become narrower only where no other can."""
    wrapped = [column.wrapped(column.width) for column in columns]
    while limit is not None and _total(lines.width for lines in wrapped) > limit:
        narrower = [column.wrapped(lines.width - 1) for column, lines in zip(columns, wrapped, strict=True)]
        possible = [i for i, lines in enumerate(narrower) if lines.width < wrapped[i].width]
        if not possible:
            break  # words are never broken
        possible = [i for i in possible if i >= keys] or possible
        best = min(possible, key=lambda i: (_added_lines(wrapped, narrower[i]), narrower[i].width - wrapped[i].width))
        wrapped[best] = narrower[best]
    widths, right = [lines.width for lines in wrapped], [column.is_numeric for column in columns]
    rows = zip(*(lines.cells for lines in wrapped), strict=True)
    parts = ([lines.title for lines in wrapped], [["-" * width] for width in widths], *rows)
    return "\n".join(_lines(cells, widths, right) for cells in parts)


def _added_lines(wrapped: list[_Wrapped], narrower: _Wrapped) -> int:
    """Return by how many lines a table grows when one of its columns becomes narrower."""
    heights = [max(row) for row in zip(*(lines.heights for lines in wrapped), strict=True)]
    return sum(max(0, new - old) for new, old in zip(narrower.heights, heights, strict=True))


def _fill(words: Sequence[str], separator: str, width: int) -> list[str]:
    """Join words to lines of at most this width."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(word)
    return lines


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]) -> str:
    """Return a row, of several lines where cells have several."""
    return "\n".join(
        GAP.join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in zip_longest(*cells, fillvalue="")
    )


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
