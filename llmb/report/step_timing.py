"""Step-time tables of NVIDIA's recipes: parse_train_timing.sh and parse_train_timing_mbridge.sh.

    llmb-run timing --style megatron_bridge --format=csv experiments

One row for each run: mean and sample standard deviation of step time and TFLOP/s over a window of iterations, numbered
as the log numbers them. The window is the requested one, or that of the run's configuration, of its recipe, or of the
document that prints the table; a run with fewer steps is measured over a shorter one, which a note says. A run that
does not reach the window's end, or ends with an error after it, is Failed; one whose loss or gradient norm is NaN or
infinite is Invalid.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from llmb.errors import ConfigError, UnknownName
from llmb.results.log_window import MEGATRON_BRIDGE_WINDOW, NEMO_WINDOW, Window, named_window
from llmb.results.timed_run import TimedRun


@dataclass(frozen=True)
class Style:
    """Differences between the two tables."""

    files: str  # which logs are taken
    window: Window  # in the document that prints the table
    scale: float  # from seconds to the unit shown
    title: str
    headings: tuple[str, str]
    csv_times: tuple[str, str]
    json_keys: tuple[str, str, str, str]


STYLES = {
    "nemo": Style(
        files="*.out",
        window=NEMO_WINDOW,
        scale=1,
        title="Train Step Timing and TFLOPS Analysis",
        headings=("Time Mean (s)", "Time Std (s)"),
        csv_times=("time_mean_seconds", "time_std_dev_seconds"),
        json_keys=("time_mean", "time_std_dev", "tflops_per_gpu_mean", "tflops_per_gpu_std_dev"),
    ),
    "megatron_bridge": Style(
        files="log*.out",
        window=MEGATRON_BRIDGE_WINDOW,
        scale=1000,
        title="Elapsed Time (ms) and TFLOPS/GPU Analysis",
        headings=("Time Mean (ms)", "Time Std (ms)"),
        csv_times=("time_mean_ms", "time_std_dev_ms"),
        json_keys=("time_mean_ms", "time_std_ms", "tflops_mean", "tflops_std"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class TimingRow:
    """Row of one run."""

    name: str
    job_id: str | None
    status: Literal["Success", "Failed", "Invalid"]
    window: Window
    time_mean: float | None = None
    time_std: float | None = None
    tflops_mean: float | None = None
    tflops_std: float | None = None
    max_iteration: int | None = None  # of Failed: how far it came
    reason: str | None = None  # of Invalid
    invalid_iteration: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def figures(self) -> tuple[float | None, float | None, float | None, float | None]:
        return self.time_mean, self.time_std, self.tflops_mean, self.tflops_std


@dataclass(frozen=True, kw_only=True)
class TimingTable:
    """All rows, with what their header says."""

    style: Style
    folder: Path
    window: Window  # of most rows, before it is shortened
    rows: list[TimingRow]


def check_request(style: str, format: str, window: Window | None) -> Style:
    """Return the style by its name; raise on a wrong one, a wrong format or an empty window."""
    if style not in STYLES:
        raise UnknownName("style", style, STYLES)
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if window is not None and window[0] > window[1]:
        raise ConfigError(f"the window {window[0]}-{window[1]} is empty: its first iteration comes after its last")
    return STYLES[style]


def timing_table(
    runs: Sequence[TimedRun],
    style: Style,
    folder: Path,
    recipe_windows: Mapping[str, Window],
    window: Window | None = None,
    full_names: bool = False,
) -> TimingTable:
    """Return the table of runs below a folder; `recipe_windows`: by workload, for logs without a configuration."""
    windows = [window or run.window or named_window(run.log, recipe_windows) or style.window for run in runs]
    common = Counter(windows).most_common(1)[0][0] if windows else window or style.window
    rows = [_row(run, style, run_window, common, full_names) for run, run_window in zip(runs, windows, strict=True)]
    return TimingTable(style=style, folder=folder, window=common, rows=rows)


def _row(run: TimedRun, style: Style, window: Window, common: Window, full_names: bool) -> TimingRow:
    first, last = fitted = _fit_window(run, window)
    name = run.log.name if full_names else run.name
    row = TimingRow(name=name, job_id=run.job_id, status="Failed", window=fitted)
    failure = (run.failure,) if run.failure else ()
    for iteration, step in run.steps.items():
        if step.not_a_number:
            return replace(row, status="Invalid", reason=step.not_a_number, invalid_iteration=iteration)
    measured = [step for iteration, step in run.steps.items() if first <= iteration <= last]
    if run.failed or not measured or max(run.steps) < last:
        return replace(row, max_iteration=max(run.steps, default=None), notes=failure)
    notes: tuple[str, ...] = ()
    if fitted != window:
        notes = (f"iterations {first}-{last} instead of {window[0]}-{window[1]}: the run has {_iterations(run)}",)
    elif window != common:
        notes = (f"iterations {first}-{last}, the window of this run",)
    time_mean, time_std = _mean_and_deviation([s.seconds * style.scale for s in measured if s.seconds is not None])
    tflops = _mean_and_deviation([step.tflops_per_gpu for step in measured if step.tflops_per_gpu is not None])
    figures = replace(row, time_mean=time_mean, time_std=time_std, tflops_mean=tflops[0], tflops_std=tflops[1])
    return replace(figures, status="Success", notes=notes + failure)


def _fit_window(run: TimedRun, window: Window) -> Window:
    """Return the window, shortened for a run of fewer iterations: its second half at least."""
    if run.last is None or window[1] <= run.last:
        return window
    return min(window[0], run.first + _iterations(run) // 2), run.last


def _iterations(run: TimedRun) -> int:
    return 0 if run.last is None else run.last - run.first + 1


def _mean_and_deviation(values: list[float]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation; a single value has no deviation."""
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


def _text(table: TimingTable) -> str:
    columns = ("Experiment", "Status", *table.style.headings, "TFLOPS_per_GPU Mean", "TFLOPS_per_GPU Std")
    names = [_label(row) for row in table.rows]
    widths = [max(w, len(c)) for w, c in zip((90, 8, 13, 12, 19, 18), columns, strict=True)]
    widths[0] = max([widths[0], *map(len, names)])

    def line(*cells: str) -> str:
        return " ".join(
            [f"{cells[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True))]
        )

    lines = [f"{table.style.title} (iterations {table.window[0]}-{table.window[1]})", "=" * 80]
    lines += [line(*columns), line(*("-" * width for width in widths))]
    for name, row in zip(names, table.rows, strict=True):
        if row.status == "Failed" and row.max_iteration is not None:
            lines.append(f"{name:<{widths[0]}} {row.status:>{widths[1]}} {f'({row.max_iteration} iterations)':>30}")
        elif row.status == "Invalid":
            lines.append(line(name, row.status, str(row.reason), f"iter {row.invalid_iteration}", "-", "-"))
        else:
            lines.append(line(name, row.status, *_cells(row, missing="-")))
    notes = [f"  {name}: {note}" for name, row in zip(names, table.rows, strict=True) for note in row.notes]
    lines += ["", "Notes:", *notes] if notes else []
    success, failed, invalid = _counts(table.rows)
    lines += ["", "Summary:", f"  Success experiments: {success}", f"  Failed experiments: {failed}"]
    lines += [f"  Invalid grad norm experiments: {invalid}"] if invalid else []
    lines += [f"  Success rate: {f'{100 * success // len(table.rows)}%' if table.rows else 'N/A'}"]
    return "\n".join(lines)


def _label(row: TimingRow) -> str:
    """Return the name with the job id, which the file name of our own logs lacks."""
    return row.name if row.job_id is None or row.name.endswith(f"_{row.job_id}") else f"{row.name} ({row.job_id})"


def _csv(table: TimingTable) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [*table.style.csv_times, "tflops_per_gpu_mean", "tflops_per_gpu_std_dev"]
    writer.writerow(["filename", "status", *figures, "max_iteration", "job_id", "iterations", "notes"])
    for row in table.rows:
        reached = f"{row.reason}@iteration_{row.invalid_iteration}" if row.status == "Invalid" else row.max_iteration
        iterations = f"{row.window[0]}-{row.window[1]}"
        cells = [row.name, row.status, *_cells(row, missing=""), reached, row.job_id, iterations, "; ".join(row.notes)]
        writer.writerow(cells)
    return text.getvalue().removesuffix("\n")


def _json(table: TimingTable) -> str:
    results = []
    for row in table.rows:
        rounded = (None if v is None else round(v, d) for v, d in zip(row.figures, (3, 3, 2, 2), strict=True))
        entry: dict[str, Any] = {"filename": row.name, "job_id": row.job_id, "status": row.status}
        entry |= dict(zip(table.style.json_keys, rounded, strict=True))
        if row.status == "Failed":
            entry["max_iteration"] = row.max_iteration
        elif row.status == "Invalid":
            entry |= {"reason": row.reason, "invalid_iteration": row.invalid_iteration}
        results.append(entry | {"window": row.window, "notes": row.notes})
    success, failed, invalid = _counts(table.rows)
    return json.dumps(
        {
            "analysis": {
                "min_iteration": table.window[0],
                "max_iteration": table.window[1],
                "experiments_directory": str(table.folder),
            },
            "results": results,
            "summary": {
                "success_experiments": success,
                "failed_experiments": failed,
                "invalid_grad_norm_experiments": invalid,
                "success_rate": 100 * success // len(table.rows) if table.rows else None,
            },
        },
        indent=2,
    )


FORMATS: dict[str, Callable[[TimingTable], str]] = {"table": _text, "csv": _csv, "json": _json}


def _cells(row: TimingRow, missing: str) -> list[str]:
    return [missing if v is None else f"{v:.{d}f}" for v, d in zip(row.figures, (3, 3, 2, 2), strict=True)]


def _counts(rows: list[TimingRow]) -> tuple[int, int, int]:
    """Return the numbers of successful, unsuccessful and (of those) invalid experiments."""
    success = sum(row.status == "Success" for row in rows)
    return success, len(rows) - success, sum(row.status == "Invalid" for row in rows)
