"""Table of repeated runs of one configuration: mean, interval and spread of each main figure."""

from collections.abc import Sequence

from llmb.report.table import number, render
from llmb.results.repeats import intervals
from llmb.results.result import Result


def repeats(results: Sequence[Result]) -> str:
    """Return the table printed after several runs; empty when fewer than two succeeded."""
    estimates = intervals(results)
    if not estimates:
        return ""
    rows = [
        (i.metric, number(i.mean), f"{number(i.low)} to {number(i.high)}", _percent(i.error), _percent(i.spread))
        for i in estimates
    ]
    header = (f"over {estimates[0].n} of {len(results)} runs", "mean", "95 % interval", "+-", "largest - smallest")
    return f"{results[0].name}: repeats\n\n{render(header, rows)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"
