"""Style of the pictures: colours for light and dark, one texture for each kind of work.

A picture on a page uses the page's style and textures; a picture in a file of its own includes them.
"""

from llmb.report.timeline.task_kinds import KINDS, Texture, WorkKind

_LIGHT = "--ink:#1c2330;--soft:#59626f;--paper:#ffffff;--track:#eef0f4;--line:#d5d9e0;--range:#e3e7ee;--range2:#d3d9e4"
_DARK = "--ink:#e8ebf0;--soft:#a3adba;--paper:#14181f;--track:#20262f;--line:#353d49;--range:#2b323d;--range2:#38414e"
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
_INKS = """.lanes text{fill:var(--ink)}
.lanes .heading{font-size:17px;font-weight:600}
.lanes .name{font-weight:600}
.lanes .soft{fill:var(--soft);font-size:11px}
.lanes .end{text-anchor:end}
.lanes .mid{text-anchor:middle}
.lanes .on{fill:#fff;font-size:11px;paint-order:stroke;stroke:#0007;stroke-width:2px}
.lanes .on-pale{fill:#16202e;font-size:11px;paint-order:stroke;stroke:#fffc;stroke-width:3px}
.lanes .paper{fill:var(--paper)}
.lanes .track{fill:var(--track)}
.lanes .range{fill:var(--range)}
.lanes .range2{fill:var(--range2)}
.lanes .seam{stroke:var(--paper);stroke-width:.7}
.lanes .grid{stroke:var(--ink);stroke-opacity:.13;stroke-width:1;shape-rendering:crispEdges}
.lanes .limit{stroke:var(--ink);stroke-width:1;stroke-dasharray:5 4;opacity:.75}
.lanes .columns{shape-rendering:crispEdges}
.lanes .rate{fill:#557a9e}
.lanes .memory{fill:#8d95a3}
.texture{fill:none;stroke:#fff;stroke-opacity:.38;stroke-width:1.2}
.dot{fill:#fff;fill-opacity:.55}
.dark-texture{fill:none;stroke:#1d4f91;stroke-opacity:.55;stroke-width:1.4}
.dark-dot{fill:#3a2a05;fill-opacity:.45}
.wait-texture{fill:none;stroke:#d03b3b;stroke-width:1.6}
"""
_TEXTURES: dict[Texture, str] = {
    "plain": "",
    "slant": '<path class="{ink}" d="M-1 1L1 -1M0 6L6 0M5 7L7 5"/>',
    "cross": '<path class="{ink}" d="M0 6L6 0M0 0L6 6"/>',
    "dots": '<circle class="{dot}" cx="2" cy="2" r="1"/><circle class="{dot}" cx="5" cy="5" r="1"/>',
    "rows": '<path class="{ink}" d="M0 3H6"/>',
    "bars": '<path class="{ink}" d="M3 0V6"/>',
}


def style() -> str:
    """Return the style sheet of the pictures, with the colours of paper and ink that a page may use as well."""
    fills = "".join(f".{k.css_class}{{fill:{_fill(k)}}}\n" for k in KINDS)
    dark = f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    return (
        f":root{{{_LIGHT}}}\n{dark}@media print{{:root{{{_LIGHT}}}}}\n.lanes text{{font:12px {FONT}}}\n{_INKS}{fills}"
    )


def textures() -> str:
    """Return the patterns that the style sheet refers to."""
    return f"<defs>{''.join(_pattern(k) for k in KINDS if k.texture != 'plain')}</defs>"


def _fill(work_kind: WorkKind) -> str:
    return work_kind.colour if work_kind.texture == "plain" else f"url(#t-{work_kind.name})"


def _pattern(work_kind: WorkKind) -> str:
    waits = work_kind.name == "wait"
    ink = "wait-texture" if waits else ("dark-texture" if work_kind.pale else "texture")
    drawn = _TEXTURES[work_kind.texture].format(ink=ink, dot="dark-dot" if work_kind.pale else "dot")
    ground = "" if waits else f'<rect width="6" height="6" fill="{work_kind.colour}"/>'
    frame = f'id="t-{work_kind.name}" width="6" height="6" patternUnits="userSpaceOnUse"'
    return f"<pattern {frame}>{ground}{drawn}</pattern>"
