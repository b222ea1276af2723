"""Comparison of any number of runs, each with the first, which is the baseline.

compare_runs([ComparedRun(config=..., result=...), ...]) -> {"runs": [...], "figures": [...], "comparisons": [...]}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from string import ascii_uppercase
from typing import Any

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.samples.timed_requests import TimedRequest
from llmb.report.compare.run_pair import compare, mean_figures
from llmb.results.compare.baseline import MeasuredRun
from llmb.results.compare.differing_settings import differing_fields
from llmb.results.result import Result


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison; `requests`: measured and successful, of a serving run."""

    config: RunConfig | None
    result: Result
    cluster: str | None = None  # from where it was imported
    requests: Sequence[TimedRequest] = ()
    repeats: Sequence[MeasuredRun] = ()  # more runs of the same configuration


def compare_runs(runs: Sequence[ComparedRun], force: bool = False) -> dict[str, Any]:
    """Return everything `llmb-run compare` prints of several runs, as plain data."""
    if len(runs) < 2:
        raise ConfigError("a comparison needs two runs or more; the first is the baseline")
    labels = run_labels(len(runs))
    baseline = runs[0]
    comparisons = [
        compare(
            (baseline.config, baseline.result),
            (run.config, run.result),
            force,
            (baseline.cluster, run.cluster),
            (baseline.requests, run.requests),
            (labels[0], label),
            (baseline.repeats, run.repeats),
        )
        for label, run in zip(labels[1:], runs[1:], strict=True)
    ]
    values = [mean_figures([(run.config, run.result), *((c, r) for c, r, _ in run.repeats)]) for run in runs]
    return {
        "runs": [
            {
                "label": label,
                "name": run.result.name,
                "runs": 1 + len(run.repeats),
                "cluster": run.cluster,
                "status": run.result.status,
            }
            for label, run in zip(labels, runs, strict=True)
        ],
        "differing": differing_fields([run.config for run in runs]),
        "figures": [
            {"figure": name, "values": [figures[name] for figures in values], "ratios": _ratios(name, comparisons)}
            for name in values[0]
            if sum(figures[name] is not None for figures in values) >= 2
        ],
        "comparisons": comparisons,
    }


def _ratios(figure: str, comparisons: Sequence[dict[str, Any]]) -> list[float | None]:
    """Return a figure of each run over that of the baseline."""
    return [next((f["ratio"] for f in c["figures"] if f["figure"] == figure), None) for c in comparisons]


def run_labels(runs: int) -> list[str]:
    """Return A, B, ..., Z, AA, AB, ..."""
    names = ("".join(letters) for length in count(1) for letters in product(ascii_uppercase, repeat=length))
    return list(islice(names, runs))
