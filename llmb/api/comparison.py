"""Comparison of runs from Python: the first is the baseline, every other one has its verdict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmb.api.html_table import html_table, section
from llmb.api.stored_result import Result, load
from llmb.cli.compare_read import cluster_of
from llmb.cli.stored_runs import load_requests
from llmb.launch.run_folder import RunFolder
from llmb.report.compare import compare as compare_pair
from llmb.report.compare import text
from llmb.report.table import number
from llmb.results.job_store import Job


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Runs against the first of them; tuples have one entry for each other run."""

    baseline: Result
    runs: tuple[Result, ...]  # without the baseline
    details: tuple[dict[str, Any], ...]  # what `llmb-run compare --json` prints

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """Speeds in tokens/s over that of the baseline: above 1 is faster; None: the runs share no figure of speed."""
        return tuple(each["speed"]["ratio"] if each["speed"] else None for each in self.details)

    @property
    def intervals(self) -> tuple[tuple[float, float] | None, ...]:
        """95 % intervals of the speedups; None: too few samples."""
        speeds = [each["speed"] for each in self.details]
        return tuple((s["low"], s["high"]) if s and s["low"] is not None else None for s in speeds)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence each, in which A is the baseline and B the other run."""
        return tuple(each["verdict"] for each in self.details)

    def __repr__(self) -> str:
        return f"<llmb.Comparison {'; '.join(self.verdicts)}>"

    def __str__(self) -> str:
        return "\n\n".join(map(text, self.details))

    def _repr_html_(self) -> str:
        return "".join(map(_html, self.details))


def compare(
    a: Result | Job | str | Path, b: Result | Job | str | Path, *more: Result | Job | str | Path, force: bool = False
) -> Comparison:
    """Compare runs with the first: results, rows of `llmb.runs()`, job ids or run folders.

    `force`: compare different workloads anyway.

    >>> compared = llmb.compare("L1", llmb.load("L1"))
    >>> compared.speedups, len(compared.verdicts)
    ((1.0,), 1)
    """
    baseline, *others = (run if isinstance(run, Result) else load(run) for run in (a, b, *more))
    details = tuple(_pair(baseline, other, force) for other in others)
    return Comparison(baseline=baseline, runs=tuple(others), details=details)


def _pair(a: Result, b: Result, force: bool) -> dict[str, Any]:
    folders = [RunFolder.open(result.folder) for result in (a, b)]
    return compare_pair(
        (a.config, a),
        (b.config, b),
        force,
        (cluster_of(folders[0]), cluster_of(folders[1])),
        (load_requests(folders[0], a.config), load_requests(folders[1], b.config)),
    )


def _html(details: dict[str, Any]) -> str:
    differing = [(field, *values) for field, values in details["differing"].items()]
    figures = [(each["figure"], *(number(each[key]) for key in ("a", "b", "ratio"))) for each in details["figures"]]
    return section(
        f"verdict: {details['verdict']}",
        html_table(("figure", f"A: {details['a']}", f"B: {details['b']}", "B/A"), figures),
        html_table(("differing field", "A", "B"), differing) if differing else "",
        notes=details["doubts"],
    )
