"""The report page of a run: a file, and itself inside a notebook."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

HEIGHT_PX = 800


@dataclass(frozen=True)
class InlinePage:
    """Self-contained HTML page at `path`; a notebook shows it in a frame."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {HEIGHT_PX}px; border: none"></iframe>'
