"""Constants of the predictor, from `step_constants.yaml`: values with unit, meaning and prior.

calibrated()["gemm_bf16_hopper"]        -> 0.7, a fraction of the peak
"""

from pathlib import Path
from typing import Any

from llmb.errors import UnknownName
from llmb.perfmodel.step_time.fitted_constants import Constant, Constants, fitted_values, read_constants, read_interval

CONSTANTS_FILE = Path(__file__).with_name("step_constants.yaml")
NEWEST = "megatron-bridge-2026"  # whose releases change from one to the next
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
ALIASES = {
    "nemo": "megatron",
    "megatron-core": "megatron-bridge",
    "maxtext": "jax",
    "paxml": "jax",
}  # names of projects


def parse_engine(text: str) -> str:
    """Return an engine by its name or the name of its project; unknown names list the known ones."""
    name = text.strip().lower().replace("_", "-")
    name = ALIASES.get(name, name)
    if name not in ENGINES:
        raise UnknownName("value of engine", text, ENGINES)
    return name


def constants() -> dict[str, Constant]:
    """Return all constants by name."""
    return read_constants(CONSTANTS_FILE)


def calibrated() -> Constants:
    """Return the fitted value of every constant."""
    return fitted_values(CONSTANTS_FILE)


def interval_data() -> dict[str, Any]:
    """Return the spread of residuals of left-out groups, by kind of row."""
    return read_interval(CONSTANTS_FILE)
