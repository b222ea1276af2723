"""Step-time tables of NVIDIA's recipes: parse_train_timing.sh and parse_train_timing_mbridge.sh.

    llmb-run timing --style megatron_bridge --format=csv experiments

One row for each log: mean and sample standard deviation of step time and TFLOP/s over a window of iterations, numbered
as the log numbers them (NeMo from 0, Megatron-Bridge from 1). A log that does not reach the window's end is Failed, one
whose loss or gradient norm is NaN or infinite is Invalid; no log is left out.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from llmb.errors import ConfigError, UnknownName
from llmb.events import StepDone
from llmb.results.readers.log_lines import clean, file_lines
from llmb.results.readers.reader_choice import READERS

DEFAULT_WINDOW = (35, 44)  # Nemotron-H and Grok-1 are measured over 11-44


@dataclass(frozen=True)
class Style:
    """Differences between the two tables."""

    reader: str
    files: str  # which logs are taken
    first: int  # the log's number of the first step
    scale: float  # from seconds to the unit shown
    title: str
    headings: tuple[str, str, str, str]
    csv_times: tuple[str, str]
    json_keys: tuple[str, str, str, str]


STYLES = {
    "nemo": Style(
        reader="nemo",
        files="*.out",
        first=0,
        scale=1,
        title="Train Step Timing and TFLOPS Analysis",
        headings=("Time Mean (s)", "Time Std (s)", "TFLOPS_per_GPU Mean", "TFLOPS_per_GPU Std"),
        csv_times=("time_mean_seconds", "time_std_dev_seconds"),
        json_keys=("time_mean", "time_std_dev", "tflops_per_gpu_mean", "tflops_per_gpu_std_dev"),
    ),
    "megatron_bridge": Style(
        reader="megatron_bridge",
        files="log*.out",
        first=1,
        scale=1000,
        title="Elapsed Time (ms) and MODEL_TFLOPS/GPU Analysis",
        headings=("Time Mean (ms)", "Time Std (ms)", "MODEL_TFLOPS_per_GPU Mean", "MODEL_TFLOPS_per_GPU Std"),
        csv_times=("time_mean_ms", "time_std_dev_ms"),
        json_keys=("time_mean_ms", "time_std_ms", "tflops_mean", "tflops_std"),
    ),
}

# Logs of other steps of a job, and prefixes of logs that are no experiment unless they contain timings.
_OTHER_LOGS = ("nccltrace", "prepare_squad_dataset_exp", "import_ckpt_exp", "nsys_analysis")
_OTHER_STARTS = ("sbatch_", "vboost")
_EXPERIMENT_WORDS = re.compile("iteration|training|model|experiment")
_ACCOUNT = re.compile(r"^.*?\.(?=[A-Za-z])(?!out$)")  # log-<account>-<experiment>. in front of the name itself


@dataclass(frozen=True)
class TimingRow:
    """Row of one experiment."""

    name: str
    status: Literal["Success", "Failed", "Invalid"]
    time_mean: float | None = None
    time_std: float | None = None
    tflops_mean: float | None = None
    tflops_std: float | None = None
    max_iteration: int | None = None
    reason: str | None = None  # of Invalid
    invalid_iteration: int | None = None

    @property
    def figures(self) -> tuple[float | None, float | None, float | None, float | None]:
        return self.time_mean, self.time_std, self.tflops_mean, self.tflops_std


def timing_report(
    folder: Path,
    style: str,
    format: str = "table",
    full_names: bool = False,
    window: tuple[int, int] = DEFAULT_WINDOW,
) -> tuple[str, bool]:
    """Return the report on every log below a folder, and whether any experiment succeeded."""
    if style not in STYLES:
        raise UnknownName("style", style, STYLES)
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if window[0] > window[1]:
        raise ConfigError(f"the window {window[0]}-{window[1]} is empty: its first iteration comes after its last")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    table_style = STYLES[style]
    logs = [path for path in sorted(folder.rglob(table_style.files)) if path.is_file() and not _is_other(path)]
    if not logs:
        raise ConfigError(f"no {table_style.files} files below {folder}")
    candidates = (_row(path, path.name if full_names else short_name(path.name), table_style, window) for path in logs)
    rows = [row for row in candidates if row is not None]
    return FORMATS[format](rows, table_style, window, folder), any(row.status == "Success" for row in rows)


def short_name(file_name: str) -> str:
    """Return the experiment of a log file: its name without account prefix and task number."""
    return _ACCOUNT.sub("", file_name).removesuffix(".out").removesuffix("_0")


def _is_other(path: Path) -> bool:
    return any(word in path.name for word in _OTHER_LOGS)


def _row(path: Path, name: str, style: Style, window: tuple[int, int]) -> TimingRow | None:
    """Return the row of a log, or None if it is not the log of an experiment."""
    steps: dict[int, StepDone] = {}  # by the log's own number; where ranks print alike, the first counts
    for event in READERS[style.reader].events(path):
        if isinstance(event, StepDone):
            iteration = event.step - 1 + style.first
            if reason := _not_a_number(event):
                return TimingRow(name, "Invalid", reason=reason, invalid_iteration=iteration)
            steps.setdefault(iteration, event)
    if not steps:
        return TimingRow(name, "Failed") if _is_experiment(path) else None
    measured = {n: step for n, step in steps.items() if window[0] <= n <= window[1]}
    if max(measured, default=None) != window[1]:
        return TimingRow(name, "Failed", max_iteration=max(measured or steps))
    seconds = [step.seconds for step in measured.values() if step.seconds is not None]
    tflops = [s.reported_tflops_per_gpu for s in measured.values() if s.reported_tflops_per_gpu is not None]
    times = _mean_and_deviation([value * style.scale for value in seconds])
    return TimingRow(name, "Success", *times, *_mean_and_deviation(tflops))


def _not_a_number(step: StepDone) -> str | None:
    for field in ("grad_norm", "loss"):
        value = getattr(step, field)
        if value is not None and not math.isfinite(value):
            return f"{field}={value}"
    return None


def _is_experiment(path: Path) -> bool:
    if path.name.startswith(_OTHER_STARTS):
        return False
    return any(_EXPERIMENT_WORDS.search(line.text) for line in clean(file_lines(path)))


def _mean_and_deviation(values: list[float]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation; a single value has no deviation."""
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


def _table(rows: list[TimingRow], style: Style, window: tuple[int, int], folder: Path) -> str:
    columns = ("Experiment", "Status", *style.headings)
    widths = [max(w, len(c)) for w, c in zip((90, 8, 13, 12, 19, 18), columns, strict=True)]

    def line(*cells: str) -> str:
        return " ".join(
            [f"{cells[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True))]
        )

    lines = [f"{style.title} (iterations {window[0]}-{window[1]})", "=" * 80]
    lines += [line(*columns), line(*("-" * width for width in widths))]
    for row in rows:
        if row.status == "Failed" and row.max_iteration is not None:
            lines.append(f"{row.name:<{widths[0]}} {row.status:>{widths[1]}} {f'({row.max_iteration} iterations)':>30}")
        elif row.status == "Invalid":
            lines.append(line(row.name, row.status, str(row.reason), f"iter {row.invalid_iteration}", "-", "-"))
        else:
            lines.append(line(row.name, row.status, *_texts(row, missing="-")))
    success, failed, invalid = _counts(rows)
    lines += ["", "Summary:", f"  Success experiments: {success}", f"  Failed experiments: {failed}"]
    lines += [f"  Invalid grad norm experiments: {invalid}"] if invalid else []
    lines += [f"  Success rate: {f'{100 * success // len(rows)}%' if rows else 'N/A'}"]
    return "\n".join(lines)


def _csv(rows: list[TimingRow], style: Style, window: tuple[int, int], folder: Path) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["filename", "status", *style.csv_times, "tflops_per_gpu_mean", "tflops_per_gpu_std_dev", "max_iteration"]
    )
    for row in rows:
        last = f"{row.reason}@iteration_{row.invalid_iteration}" if row.status == "Invalid" else row.max_iteration
        writer.writerow([row.name, row.status, *_texts(row, missing=""), last])
    success, failed, _ = _counts(rows)
    text.write(f"# Summary: {success} success, {failed} failed, {len(rows)} total")
    return text.getvalue()


def _json(rows: list[TimingRow], style: Style, window: tuple[int, int], folder: Path) -> str:
    results = []
    for row in rows:
        rounded = (None if v is None else round(v, d) for v, d in zip(row.figures, (3, 3, 2, 2), strict=True))
        entry: dict[str, Any] = {"filename": row.name, "status": row.status}
        entry |= dict(zip(style.json_keys, rounded, strict=True))
        if row.status == "Failed":
            entry["max_iteration"] = row.max_iteration
        elif row.status == "Invalid":
            entry |= {"reason": row.reason, "invalid_iteration": row.invalid_iteration}
        results.append(entry)
    success, failed, invalid = _counts(rows)
    return json.dumps(
        {
            "analysis": {
                "min_iteration": window[0],
                "max_iteration": window[1],
                "experiments_directory": str(folder),
            },
            "results": results,
            "summary": {
                "success_experiments": success,
                "failed_experiments": failed,
                "invalid_grad_norm_experiments": invalid,
                "success_rate": 100 * success // len(rows) if rows else None,
            },
        },
        indent=2,
    )


FORMATS: dict[str, Callable[[list[TimingRow], Style, tuple[int, int], Path], str]] = {
    "table": _table,
    "csv": _csv,
    "json": _json,
}


def _texts(row: TimingRow, missing: str) -> list[str]:
    return [missing if v is None else f"{v:.{d}f}" for v, d in zip(row.figures, (3, 3, 2, 2), strict=True)]


def _counts(rows: list[TimingRow]) -> tuple[int, int, int]:
    """Return the numbers of successful, unsuccessful and (of those) invalid experiments."""
    success = sum(row.status == "Success" for row in rows)
    return success, len(rows) - success, sum(row.status == "Invalid" for row in rows)
