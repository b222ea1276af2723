"""Comparisons for other programs and for people: csv of every figure, Markdown for a pull request."""

import csv
from io import StringIO
from typing import Any

from llmb.report.compare.compare_text import ratio_rows
from llmb.report.compare.run_pair import LATENCIES
from llmb.report.table import number


def set_csv(compared: dict[str, Any]) -> str:
    """Return a row per run and figure: value, ratio to the baseline, its interval where the figure has one."""
    intervals = {
        (label, _column(name)): (low, high) for label, name, _, low, high in ratio_rows(compared["comparisons"])
    }
    output = StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(("run", "name", "status", "figure", "value", "ratio", "ratio_low", "ratio_high"))
    for place, run in enumerate(compared["runs"]):
        for figure in compared["figures"]:
            ratio = 1.0 if place == 0 else figure["ratios"][place - 1]
            low, high = intervals.get((run["label"], figure["figure"]), (None, None))
            value = figure["values"][place]
            writer.writerow((run["label"], run["name"], run["status"], figure["figure"], value, ratio, low, high))
    return output.getvalue().rstrip("\n")


def _column(name: str) -> str:
    """Return the figure that a ratio belongs to: a rate by its unit, a latency by its mean."""
    return (
        f"{name} (mean)"
        if name in LATENCIES
        else name.replace("output ", "output_").replace("tokens/s", "tokens_per_s")
    )


def set_markdown(compared: dict[str, Any]) -> str:
    """Return verdicts, ratios and differing fields as Markdown tables."""
    runs, comparisons = compared["runs"], compared["comparisons"]
    labels = [run["label"] for run in runs]
    parts = [
        "\n".join(
            f"- {c['labels'][1]} against {c['labels'][0]}: **{_plain(c['verdict'])}**" + _doubts(c["doubts"])
            for c in comparisons
        )
    ]
    rows = [
        (label, name, number(ratio), "-" if low is None else f"{number(low)} to {number(high)}")
        for label, name, ratio, low, high in ratio_rows(comparisons)
    ]
    parts.append(_table((f"run against {labels[0]}", "figure", "ratio", "95 % interval"), rows))
    figures = [(f["figure"], *f["values"], *f["ratios"]) for f in compared["figures"]]
    parts.append(_table(("figure", *labels, *(f"{label}/{labels[0]}" for label in labels[1:])), figures))
    if compared["differing"]:
        settings = [(field, *values) for field, values in compared["differing"].items()]
        parts.append(_table(("setting", *labels), settings))
    parts.append("\n".join(f"- {run['label']}: `{run['name']}`" for run in runs))
    return "\n\n".join(parts)


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _doubts(doubts: list[str]) -> str:
    return "; but" + "".join(f"\n  - {_plain(doubt)}" for doubt in doubts) if doubts else ""


def _plain(cell: Any) -> str:
    if cell is None:
        return "-"
    return number(cell) if isinstance(cell, float) else " ".join(str(cell).split()).replace("|", "\\|")
