"""What a benchmark of several parts found: tables on the screen, everything in one JSON file."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.report.table import render


@dataclass(kw_only=True)
class Findings:
    """Of one run of a program."""

    json: Path | None
    results: dict[str, list[Any]] = field(default_factory=dict)  # by part
    began: float = field(default_factory=time.perf_counter)

    def keep(self, part: str, *found: Any) -> None:
        """For the file; written each time, so that what was measured is there whatever follows."""
        self.results.setdefault(part, []).extend(found)
        if self.json:
            self.json.write_text(json.dumps(self.results, indent=1))

    def head(self, title: str) -> None:
        """A title with the seconds that have gone by."""
        print(f"\n{title}   [{time.perf_counter() - self.began:.0f} s]", flush=True)

    def say(self, title: str, header: Iterable[str], rows: Iterable[Iterable[Any]], *notes: str) -> None:
        """A table with its title, and what a reader must know of it."""
        self.head(title)
        print(render(list(header), [list(row) for row in rows]))
        print("".join(f"  {note}\n" for note in notes), end="", flush=True)
