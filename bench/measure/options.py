"""Command line of the programs that measure a GPU: parts, rows, and tiny models.

parser = build_parser(__doc__, PARTS)
parser.add_argument("--steps", type=int)
options = parse_options(parser, PARTS, ROWS)       # options.parts: a set of names
rows = select_rows(ROWS, options.row)
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar


class Titled(Protocol):
    """A row."""

    @property
    def title(self) -> str: ...


Row = TypeVar("Row", bound=Titled)


def build_parser(doc: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts), help=f"parts, of {','.join(parts)}")
    parser.add_argument("--row", default="", help="only rows, and peers of rows, with one of these in their title")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    return parser


def parse_options(parser: argparse.ArgumentParser, parts: Sequence[str], rows: Sequence[Titled]) -> argparse.Namespace:
    """Parse the command line, or exit with one line that names the mistake."""
    options = parser.parse_args()
    options.parts = frozenset(options.only.split(","))
    if unknown := options.parts - set(parts):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; parts are: {', '.join(parts)}")
    if not select_rows(rows, options.row):
        parser.error(f"no row is called {options.row}; rows are: {', '.join(row.title for row in rows)}")
    if not options.tiny:
        import torch  # here: processes that only plan have no use for it

        if not torch.cuda.is_available():
            parser.error("needs a CUDA GPU; --tiny runs anywhere")
    return options


def select_rows(rows: Sequence[Row], names: str) -> tuple[Row, ...]:
    """Return the rows with one of these names in their title."""
    return tuple(row for row in rows if any(name in row.title for name in names.split(",")))
