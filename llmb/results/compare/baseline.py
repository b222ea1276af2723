"""Baseline of a regression gate: a small JSON file that lives in a repository, and the verdict on a later run.

    baseline_of([(config, result, requests)]) -> Baseline         written by `gate --save FILE RUN ...`
    judge(baseline, current, "tokens_per_s", 0.02) -> GateVerdict(state="slower", slowdown=0.05, low=0.04, high=0.06)

Every figure is kept as a time, lower is better: seconds per token, mean latencies. Of several runs, repeats of one
configuration, the interval is Student's over the logarithms of their medians: it holds the noise between runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from llmb.config.serialization import build, read_json, to_json
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.samples.timed_requests import TimedRequest
from llmb.results.compare.differing_settings import settings_of
from llmb.results.compare.median_interval import CONFIDENCE, MedianInterval, median_interval, ratio_of
from llmb.results.compare.speed_ratio import tokens_per_step
from llmb.results.compare.student import student_quantile
from llmb.results.request_bootstrap import request_times
from llmb.results.result import Result

HARMLESS = ("schema", "limits.", "workload.seed")  # settings that change no figure; repeats on a server differ in seed

MeasuredRun = tuple[RunConfig, Result, Sequence[TimedRequest]]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Times of a configuration on some hardware; `times`: of each figure, in s per token or ms."""

    schema: int = 1
    name: str
    gpu_name: str | None
    gpus: int | None
    commit: str | None
    versions: dict[str, str] = field(default_factory=dict)
    runs: int = 1
    times: dict[str, MedianInterval]  # tokens_per_s, output_tokens_per_s, ttft_ms, tpot_ms, e2e_ms
    samples_sha256: str
    settings: dict[str, Any]  # of the configuration, by dotted name


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """Slowdown of a figure against its baseline: 0.02 is 2 % more time. The interval is None with too few samples."""

    state: Literal["ok", "slower", "undecided"]
    slowdown: float
    low: float | None
    high: float | None


def baseline_of(runs: Sequence[MeasuredRun]) -> Baseline:
    """Return the baseline of a run, or of several runs of one configuration on one kind of hardware."""
    check_repeats(runs)
    config, result, _ = runs[0]
    times = repeated_times(runs)
    if not times:
        raise ConfigError(f"{result.name} has no samples of its speed to judge")
    samples = [[list(r.step_time_s.samples) if r.step_time_s else [q.end for q in requests]] for _, r, requests in runs]
    return Baseline(
        name=result.name,
        gpu_name=result.gpu_name or result.gpu,
        gpus=result.gpus,
        commit=result.commit,
        versions=result.versions,
        runs=len(runs),
        times=times,
        samples_sha256=sha256(repr(samples).encode()).hexdigest(),
        settings=json.loads(to_json(settings_of(config))),  # as the file will hold them
    )


def check_repeats(runs: Sequence[MeasuredRun]) -> None:
    """Raise ConfigError unless all runs are complete, of one configuration and on one kind of hardware."""
    config, result, _ = runs[0]
    for other_config, other_result, _ in runs:
        if other_result.status != "ok":
            raise ConfigError(f"{other_result.name} is {other_result.status}: only a complete run can be judged")
        if differences := mismatches(settings_of(config), settings_of(other_config)):
            raise ConfigError(f"the runs are not repeats of one configuration: {differences[0]}")
        if (other_result.gpu_name, other_result.gpus) != (result.gpu_name, result.gpus):
            raise ConfigError(f"the runs are not on one kind of hardware: {result.gpu_name}, {other_result.gpu_name}")


def read_baseline(path: Path) -> Baseline:
    """Read a baseline; a ConfigError names the file and a time that is none."""
    baseline = build(Baseline, read_json(path), str(path))
    if not baseline.times:
        raise ConfigError(f"{path} holds no times; save it again")
    for name, time in baseline.times.items():
        if not all(value is None or 0 < value < math.inf for value in (time.low, time.median, time.high)):
            raise ConfigError(f"{path}: times.{name} is not above 0; save it again")
    return baseline


def repeated_times(runs: Sequence[MeasuredRun]) -> dict[str, MedianInterval]:
    """Return the times over repeats of every figure that all of them have."""
    times = [times_of(*run) for run in runs]
    shared = [name for name in times[0] if all(name in figures for figures in times)]
    return {name: repeated([figures[name] for figures in times]) for name in shared}


def repeated(times: Sequence[MedianInterval]) -> MedianInterval:
    """Return the interval over repeats; that of a single run stays its own."""
    if len(times) == 1:
        return times[0]
    logs = [math.log(time.median) for time in times]
    half = student_quantile(CONFIDENCE, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    middle, n = fmean(logs), len(logs)
    low, high = math.exp(middle - half), math.exp(middle + half)
    return MedianInterval(median=math.exp(middle), low=low, high=high, n=n, block=1, blocks=n)


def mismatches(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return a clause for each setting that differs."""
    keys = sorted(key for key in a.keys() | b.keys() if not key.startswith(HARMLESS))
    return [f"{key} is {a.get(key)} and {b.get(key)}" for key in keys if a.get(key) != b.get(key)]


def check_comparable(baseline: Baseline, current: Baseline) -> None:
    """Raise ConfigError where the baseline is of another configuration or hardware."""
    hardware = [f"{b.gpus or '?'} x {b.gpu_name}" for b in (baseline, current)]
    if hardware[0] != hardware[1]:
        raise ConfigError(
            f"the baseline is of other hardware: {hardware[0]}, the run is on {hardware[1]}; save a new one"
        )
    if differences := mismatches(baseline.settings, current.settings):
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        raise ConfigError(f"the baseline is of another configuration: {differences[0]}{more}; save a new one")


def judge(baseline: Baseline, current: Baseline, figure: str, limit: float) -> GateVerdict:
    """Return whether a figure is slower than its baseline by more than the limit, by the whole interval."""
    for label, measured in (("the baseline", baseline), ("the run", current)):
        if figure not in measured.times:
            raise ConfigError(f"{label} has no {figure}; it has: {', '.join(measured.times)}")
    times = ratio_of(current.times[figure], baseline.times[figure])
    slowdown = times.ratio - 1
    if times.low is None or times.high is None:
        return GateVerdict(state="undecided", slowdown=slowdown, low=None, high=None)
    low, high = times.low - 1, times.high - 1
    return GateVerdict(
        state="slower" if low > limit else "ok" if high <= limit else "undecided", slowdown=slowdown, low=low, high=high
    )


def times_of(config: RunConfig, result: Result, requests: Sequence[TimedRequest]) -> dict[str, MedianInterval]:
    """Return the times of a run by figure, lower is better; their intervals do not hold the noise between runs."""
    tokens = tokens_per_step(config, result)
    if result.step_time_s is not None and tokens:
        return {"tokens_per_s": median_interval([seconds / tokens for seconds in result.step_time_s.samples])}
    return request_times(requests)
