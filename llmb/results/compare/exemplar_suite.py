"""Exemplar suite: workloads at one scale, each with thresholds that its result must hold.

    suite: Llama on 8 H100
    scale: 8
    gpu_type: h100
    thresholds: {predicted: {min: 0.8}}         # of rows without their own
    rows:
      - submit: -w pretrain_llama3.1 -s 8b --dtype fp8
        thresholds: {reference: {min: 0.9}, peak_memory_gib: {max: 75}}

A threshold names a field of Result (`tokens_per_s`, `ttft_ms.p99`), or `reference` or `predicted`: the ratio of the
measured speed to the published or predicted one, above 1 is faster.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmb.config.serialization import build
from llmb.errors import ConfigError, UnknownName
from llmb.formats.yaml_file import load_yaml
from llmb.results.result import Result

RATIOS = ("reference", "predicted")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Limits of a figure."""

    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, kw_only=True)
class SuiteRow:
    """One run: options of submit, without scale and GPU type if the suite has them."""

    submit: str
    name: str | None = None  # none: that of the configuration
    thresholds: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A file of rows."""

    suite: str
    scale: int | None = None
    gpu_type: str | None = None
    thresholds: dict[str, Any] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A threshold beside what was measured; null: the result does not have it."""

    figure: str
    measured: float | None
    min: float | None
    max: float | None

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return False
        return (self.min is None or self.measured >= self.min) and (self.max is None or self.measured <= self.max)


@dataclass(frozen=True, kw_only=True)
class ExemplarRow:
    """A row to run: options of submit and its thresholds."""

    name: str | None
    submit: str
    thresholds: dict[str, Threshold]


def read_suite(path: Path) -> tuple[str, list[ExemplarRow]]:
    """Return name and rows of a suite file, with the suite's scale, GPU type and thresholds filled in."""
    suite = build(Suite, load_yaml(path, "a suite with `suite` and `rows`"), str(path))
    if not suite.rows:
        raise ConfigError(f"{path}: rows: expected at least one row")
    return suite.suite, list(_rows(suite, path))


def _rows(suite: Suite, path: Path) -> Iterator[ExemplarRow]:
    for place, data in enumerate(suite.rows, 1):
        where = f"{path}: row {place}"
        row = build(SuiteRow, data, where)
        shared = f"{f' --scale {suite.scale}' if suite.scale else ''}" + (
            f" --gpu-type {suite.gpu_type}" if suite.gpu_type else ""
        )
        limits = row.thresholds or suite.thresholds
        thresholds = {name: _threshold(name, limit, where) for name, limit in limits.items()}
        if not thresholds:
            raise ConfigError(f"{where}: no thresholds; give one, such as reference: {{min: 0.9}}")
        yield ExemplarRow(name=row.name, submit=row.submit + shared, thresholds=thresholds)


def _threshold(name: str, limit: Any, where: str) -> Threshold:
    names = [f.name for f in fields(Result)]
    if name.split(".")[0] not in names:
        raise UnknownName(f"threshold in {where}:", name, [*RATIOS, *names])
    threshold = build(Threshold, limit, f"{where}: {name}")
    if threshold.min is None and threshold.max is None:
        raise ConfigError(f"{where}: {name}: give min or max")
    return threshold


def checks(row: ExemplarRow, result: Result) -> list[Check]:
    """Return every threshold of a row beside its figure."""
    return [
        Check(figure=name, measured=_figure(name, result), min=limit.min, max=limit.max)
        for name, limit in row.thresholds.items()
    ]


def _figure(name: str, result: Result) -> float | None:
    first, _, key = name.partition(".")
    value = getattr(result, first)
    if first in RATIOS and not key:
        return None if value is None else float(value.ratio)
    if key:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None
