"""Blocks of HTML: sections, tables that copy into a spreadsheet, charts. All text is escaped here and nowhere else."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmb.report.page.page_chart import Chart
from llmb.report.table import number


def paragraphs(sentences: Iterable[str], css: str = "") -> str:
    """Return a paragraph for each sentence."""
    attribute = f' class="{css}"' if css else ""
    return "".join(f"<p{attribute}>{escape(sentence)}</p>" for sentence in sentences)


def section(name: str, title: str, content: str, note: str = "", css: str = "") -> str:
    """Return a section with a heading; an empty one is left out."""
    if not content:
        return ""
    below = f'<p class="place">{escape(note)}</p>' if note else ""
    return f'<section id="{name}" class="{css}"><h2>{escape(title)}</h2>{below}{content}</section>'


def charts_block(charts: Iterable[Chart]) -> str:
    """Return the frames that the page's script draws the charts into."""
    figures = "".join(
        f'<figure class="chart{" whole" if chart.whole else ""}" id="{chart.name}"><h3>{escape(chart.title)}</h3>'
        f'<div class="plot" id="plot-{chart.name}" style="height:{chart.height}px" role="img" '
        f'aria-label="{escape(chart.title)}"></div><figcaption>{paragraphs(chart.captions)}</figcaption></figure>'
        for chart in charts
    )
    return f'<div class="charts">{figures}</div>' if figures else ""


def table(name: str, header: Sequence[str], rows: Iterable[Sequence[Any]], css: str = "words") -> str:
    """Return a table with a button that copies it as tab-separated text; numbers are copied with all their digits."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in header)
    return (
        f'<div class="table"><table id="{name}" class="{css}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{copy_button(name)}"
    )


def copy_button(name: str, label: str = "Copy as TSV") -> str:
    """Return a button that copies the element of this id."""
    return f'<button type="button" data-copies="{name}">{escape(label)}</button>'


def link(text: str, target: str) -> str:
    """Return a link to a file beside the page."""
    from urllib.parse import quote

    return f'<a href="{escape(quote(target))}">{escape(text)}</a>'


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{'' if value is None else escape(str(value))}</td>"
    return f'<td class="number" data-value="{value!r}">{escape(number(value))}</td>'
