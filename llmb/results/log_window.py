"""Iterations of a log that count where nobody names them: those of the recipe, or else of the log's format.

named_window(Path("log-grok1.out"), {"pretrain_grok1": (11, 44)}) -> (11, 44)
step_window((11, 44), "nemo") -> (12, 45)         NeMo counts iterations from 0, our steps count from 1
"""

import re
from collections.abc import Mapping
from pathlib import Path

Window = tuple[int, int]
FIRST_ITERATION = {"nemo": 0, "megatron_bridge": 1, "torchtitan": 1}  # training logs, by format
NEMO_WINDOW: Window = (11, 44)  # in the documents of recipes that run NeMo
MEGATRON_BRIDGE_WINDOW: Window = (35, 44)  # in those of Megatron-Bridge


def named_window(log: Path, recipe_windows: Mapping[str, Window]) -> Window | None:
    """Return the window of the recipe that the log's name, or else its folder's, mentions: `llama31` is llama3.1."""
    for text in (log.name, str(log.absolute().parent)):
        letters = _letters(text)
        named = [workload for workload in recipe_windows if _letters(workload.split("_", 1)[-1]) in letters]
        if named:
            return recipe_windows[max(named, key=len)]
    return None


def format_window(log_format: str | None) -> Window:
    """Return the window in the documents whose recipes print logs of this format."""
    return NEMO_WINDOW if log_format == "nemo" else MEGATRON_BRIDGE_WINDOW


def step_window(window: Window, log_format: str | None) -> Window:
    """Return a window of a log's iterations as steps, which count from 1."""
    shift = 1 - FIRST_ITERATION.get(log_format or "", 1)
    return window[0] + shift, window[1] + shift


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
