"""Tables as a notebook shows them: plain HTML that takes on the notebook's own colours, light or dark."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

STYLE = (
    "<style>.llmb table { border-collapse: collapse; margin: 4px 0 } "
    ".llmb th, .llmb td { text-align: left; padding: 2px 12px 2px 0; vertical-align: top } "
    ".llmb th { border-bottom: 1px solid rgba(128, 128, 128, 0.5) }</style>"
)


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return one table; None is shown as a dash."""
    head = "".join(f"<th>{escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def section(title: str, *tables: str, notes: Iterable[str] = ()) -> str:
    """Return tables below a title, with notes under them."""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    listed = f"<ul>{lines}</ul>" if lines else ""
    return f'<div class="llmb">{STYLE}<strong>{escape(title)}</strong>{"".join(tables)}{listed}</div>'


def _cell(value: Any) -> str:
    return f"<td>{'-' if value is None else escape(str(value))}</td>"
