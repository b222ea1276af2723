"""Repeats of one configuration for a person: each main figure with its mean, interval and spread."""

from collections.abc import Sequence

from llmb.report.table import number, render
from llmb.results.repeats import intervals
from llmb.results.result import Result


def repeats(results: Sequence[Result]) -> str:
    """The table that follows the last of several runs; empty when fewer than two ended well."""
    found = intervals(results)
    if not found:
        return ""
    rows = [
        (i.metric, number(i.mean), f"{number(i.low)} to {number(i.high)}", _percent(i.error), _percent(i.spread))
        for i in found
    ]
    header = (f"over {found[0].n} of {len(results)} runs", "mean", "95 % interval", "+-", "largest - smallest")
    return f"{results[0].name}: repeats\n\n{render(header, rows)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
