"""The whole page: head, style, charts as data, and the scripts, all in one file that opens without a network."""

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from llmb.config.serialization import to_json
from llmb.report.page.chart_library import compressed_script
from llmb.report.page.page_chart import Chart
from llmb.report.timeline.svg_style import FONT, style, textures

_HERE = Path(__file__).parent


@cache
def page_style() -> str:
    """Return the style sheet of all pages."""
    return f"body{{font-family:{FONT}}}\n{style()}{(_HERE / 'page.css').read_text()}"


def head(title: str) -> str:
    """Return the page from its beginning to the body."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title><style>{page_style()}</style></head><body>\n"
        f'<svg class="hidden" aria-hidden="true">{textures()}</svg>\n'
    )


def page(title: str, blocks: Sequence[str], charts: Sequence[Chart] = ()) -> str:
    """Return the page of these blocks; the charts have their frames in them."""
    parts = [head(title), *(block for block in blocks if block)]
    if charts:
        figures = [{"name": c.name, "traces": c.traces, "layout": _layout(c)} for c in charts]
        parts += [
            _data("charts", "application/json", json_in_html(figures)),
            compressed("library", compressed_script()),
        ]
    parts.append(f"<script>{(_HERE / 'page.js').read_text()}</script></body></html>\n")
    return "\n".join(parts)


def compressed(name: str, base64_text: str) -> str:
    """Return an element that holds gzip data as base64, for the script to inflate."""
    return _data(name, "application/gzip", base64_text)


def json_in_html(data: Any) -> str:
    """Return JSON that cannot end its script element, whatever its texts are."""
    return to_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _data(name: str, mime: str, text: str) -> str:
    return f'<script type="{mime}" id="{name}">{text}</script>'


def _layout(chart: Chart) -> dict[str, Any]:
    legend = sum(trace.get("showlegend", True) for trace in chart.traces) > 1
    return {"showlegend": legend, "hovermode": "x unified", **chart.layout}
