"""Constants of the serving predictor, from `serving_constants.yaml`: values with unit, meaning and prior."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from llmb.config.recipe import load_yaml
from llmb.config.serialization import build
from llmb.perfmodel.step_time.step_constants import Constant, Constants

CONSTANTS_FILE = Path(__file__).with_name("serving_constants.yaml")
# Engine -> the first release of 2026 (none: one generation), as host costs fell much between the two years.
ENGINES: dict[str, tuple[int, ...] | None] = {
    "vllm": (0, 13),
    "sglang": (0, 5, 7),
    "trtllm": (1, 2),
    "native": None,
}


def engine_generation(engine: str, version: str) -> str:
    """Return the engine with its year: vllm 0.11.2 -> vllm_2025; without a version the newest."""
    first = ENGINES[engine]
    if first is None:
        return engine
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[: len(first)])
    if not version:
        return f"{engine}_2026"
    return f"{engine}_2026" if numbers >= first else f"{engine}_2025"


@cache
def serving_constants() -> dict[str, Constant]:
    """Return all constants by name."""
    return {name: build(Constant, fields, f"constant {name}") for name, fields in _data()["constants"].items()}


@cache
def calibrated_serving() -> Constants:
    """Return the fitted value of every constant."""
    return {name: c.prior if c.value is None else c.value for name, c in serving_constants().items()}


def serving_interval() -> dict[str, Any]:
    """Return half the widths of the 80 % intervals in log space."""
    data: dict[str, Any] = _data().get("interval", {})
    return data


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = load_yaml(CONSTANTS_FILE, "a section constants")
    return data
