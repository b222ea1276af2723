"""Constants of the predictor, from `step_constants.yaml`: values with unit, meaning and prior.

calibrated()["gemm_bf16_hopper"]        -> 0.7, a fraction of the peak
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmb.config.recipe import load_yaml
from llmb.config.serialization import build

CONSTANTS_FILE = Path(__file__).with_name("step_constants.yaml")
# Engine -> (constant of its step time, constant of its host time per expert layer); none: 1.
ENGINES: dict[str, tuple[str | None, str | None]] = {
    "megatron": (None, None),
    "megatron-2024": ("engine_megatron_2024", None),
    "megatron-bridge": ("engine_bridge", None),
    "megatron-bridge-2026": ("engine_bridge_2026", "host_2026"),
    "torchtitan": ("engine_torchtitan", None),
    "jax": ("engine_jax", None),
    "native": (None, None),
}

Constants = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One constant: where the fit starts, how far it may go, and what it came to."""

    prior: float
    spread: float  # standard deviation of its logarithm
    unit: str
    meaning: str
    value: float | None = None  # none: the prior


@cache
def constants() -> dict[str, Constant]:
    """Return all constants by name."""
    return {name: build(Constant, fields, f"constant {name}") for name, fields in _data()["constants"].items()}


@cache
def calibrated() -> Constants:
    """Return the fitted value of every constant."""
    return {name: c.prior if c.value is None else c.value for name, c in constants().items()}


def interval_data() -> dict[str, Any]:
    """Return the spread of residuals of left-out groups, by kind of row."""
    data: dict[str, Any] = _data().get("interval", {})
    return data


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = load_yaml(CONSTANTS_FILE, "a section constants")
    return data
