"""Results of a benchmark with several parts: tables on the screen, everything in one JSON file."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.report.table import render


@dataclass(kw_only=True)
class BenchReport:
    """Results of one run of a program."""

    json: Path | None
    results: dict[str, list[Any]] = field(default_factory=dict)  # by part
    began: float = field(default_factory=time.perf_counter)

    def record(self, part: str, *results: Any) -> None:
        """Add results to the file, which is written each time: a later failure loses nothing."""
        self.results.setdefault(part, []).extend(results)
        if self.json:
            self.json.write_text(json.dumps(self.results, indent=1))

    def print_heading(self, title: str) -> None:
        """Print a title with the seconds since the start."""
        print(f"\n{title}   [{time.perf_counter() - self.began:.0f} s]", flush=True)

    def print_table(self, title: str, header: Iterable[str], rows: Iterable[Iterable[Any]], *notes: str) -> None:
        """Print a table with its title and notes."""
        self.print_heading(title)
        print(render(list(header), [list(row) for row in rows]))
        print("".join(f"  {note}\n" for note in notes), end="", flush=True)
