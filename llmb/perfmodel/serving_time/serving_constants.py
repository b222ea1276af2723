"""Constants of the serving predictor, from `serving_constants.yaml`: values with unit, meaning and prior."""

import re
from pathlib import Path
from typing import Any

from llmb.perfmodel.step_time.fitted_constants import Constant, Constants, fitted_values, read_constants, read_interval

CONSTANTS_FILE = Path(__file__).with_name("serving_constants.yaml")
# Engine -> the first release of 2026 (none: one generation), as host costs fell much between the two years.
ENGINES: dict[str, tuple[int, ...] | None] = {
    "vllm": (0, 13),
    "sglang": (0, 5, 7),
    "trtllm": (1, 2),
    "native": None,
}


ALIASES = {"tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "trt-llm": "trtllm"}


def parse_engine(text: str) -> str:
    """Return an engine by its name or the name of its project."""
    return ALIASES.get(text.strip().lower(), text.strip().lower())


def engine_generation(engine: str, version: str) -> str:
    """Return the engine with its year: vllm 0.11.2 -> vllm_2025; without a version the newest."""
    first = ENGINES[engine]
    if first is None:
        return engine
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[: len(first)])
    if not version:
        return f"{engine}_2026"
    return f"{engine}_2026" if numbers >= first else f"{engine}_2025"


def serving_constants() -> dict[str, Constant]:
    """Return all constants by name."""
    return read_constants(CONSTANTS_FILE)


def calibrated_serving() -> Constants:
    """Return the fitted value of every constant."""
    return fitted_values(CONSTANTS_FILE)


def serving_interval() -> dict[str, Any]:
    """Return half the widths of the 80 % intervals in log space."""
    return read_interval(CONSTANTS_FILE)
