"""Constants of a predictor in a YAML file: fitted values with unit, meaning and prior, and widths of its interval.

fitted_values(path)["gemm_bf16_hopper"]        -> 0.7, a fraction of the peak
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmb.config.serialization import build
from llmb.formats.yaml_file import load_yaml

Constants = dict[str, float]
NATIVE_FILE = Path(__file__).with_name("native_constants.yaml")  # of our own engine, measured instead of fitted


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One constant: where the fit starts, how far it may go, and what it came to."""

    prior: float
    spread: float  # standard deviation of its logarithm
    unit: str
    meaning: str
    value: float | None = None  # none: the prior


@cache
def read_constants(path: Path) -> dict[str, Constant]:
    """Return all constants by name."""
    return {name: build(Constant, fields, f"constant {name}") for name, fields in _data(path)["constants"].items()}


@cache
def fitted_values(path: Path) -> Constants:
    """Return the fitted value of every constant."""
    return {name: c.prior if c.value is None else c.value for name, c in read_constants(path).items()}


def read_interval(path: Path) -> dict[str, Any]:
    """Return the half widths of the 80 % interval in log space, and what they hold for."""
    data: dict[str, Any] = _data(path).get("interval", {})
    return data


@cache
def native_constants(section: str) -> Constants:
    """Return the values of one section of native_constants.yaml: rates, work or replaced."""
    return {name: constant["value"] for name, constant in _data(NATIVE_FILE)[section].items()}


@cache
def _data(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = load_yaml(path, "sections of constants")
    return data
