"""Comparison of runs from Python: the first is the baseline, every other one has its verdict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmb.api.html_table import html_table, section
from llmb.api.stored_result import Result, load
from llmb.cli.compare.compare_command import compared_run
from llmb.launch.run_folder import RunFolder
from llmb.report.compare.compare_export import set_markdown
from llmb.report.compare.compare_text import set_text
from llmb.report.compare.run_set import compare_runs
from llmb.report.table import number
from llmb.results.job_store import Job


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Runs against the first of them; tuples have one entry for each other run."""

    baseline: Result
    runs: tuple[Result, ...]  # without the baseline
    data: dict[str, Any]  # everything, as plain data: what `llmb-run compare --json` prints of several runs

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """Speeds in tokens/s over that of the baseline: above 1 is faster; None: the runs share no figure of speed."""
        return tuple(each["speed"]["ratio"] if each["speed"] else None for each in self.data["comparisons"])

    @property
    def intervals(self) -> tuple[tuple[float, float] | None, ...]:
        """95 % intervals of the speedups; None: too few samples."""
        speeds = [each["speed"] for each in self.data["comparisons"]]
        return tuple((s["low"], s["high"]) if s and s["low"] is not None else None for s in speeds)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence each, in which A is the baseline and B, C, ... are the other runs."""
        return tuple(each["verdict"] for each in self.data["comparisons"])

    def to_markdown(self) -> str:
        """Return the comparison as a comment of a pull request."""
        return set_markdown(self.data)

    def __repr__(self) -> str:
        return f"<llmb.Comparison {'; '.join(self.verdicts)}>"

    def __str__(self) -> str:
        return set_text(self.data)

    def _repr_html_(self) -> str:
        labels = [run["label"] for run in self.data["runs"]]
        header = [f"{run['label']}: {run['name']}" for run in self.data["runs"]]
        ratios = [f"{label}/{labels[0]}" for label in labels[1:]]
        figures = [
            (each["figure"], *map(_number, each["values"]), *map(_number, each["ratios"]))
            for each in self.data["figures"]
        ]
        differing = [(field, *values) for field, values in self.data["differing"].items()]
        return section(
            "; ".join(self.verdicts),
            html_table(("figure", *header, *ratios), figures),
            html_table(("differing field", *labels), differing) if differing else "",
            notes=dict.fromkeys(doubt for each in self.data["comparisons"] for doubt in each["doubts"]),
        )


def compare(
    a: Result | Job | str | Path, b: Result | Job | str | Path, *more: Result | Job | str | Path, force: bool = False
) -> Comparison:
    """Compare runs with the first: results, rows of `llmb.runs()`, job ids or run folders.

    `force`: compare different workloads anyway.

    >>> compared = llmb.compare("L1", llmb.load("L1"))
    >>> compared.speedups, len(compared.verdicts)
    ((1.0,), 1)
    """
    baseline, *others = results = [run if isinstance(run, Result) else load(run) for run in (a, b, *more)]
    runs = [compared_run(RunFolder.open(result.folder), result.config, result) for result in results]
    return Comparison(baseline=baseline, runs=tuple(others), data=compare_runs(runs, force))


def _number(value: float | None) -> str | None:
    return None if value is None else number(value)
