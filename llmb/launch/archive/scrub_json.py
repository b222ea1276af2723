"""JSON without secrets that is still JSON: a mask put into text whose quotes deceive would spoil the whole file."""

import json
from collections.abc import Callable
from typing import Any

from llmb.launch.secrets import MASK, is_named_secret

Scrub = Callable[[str], str]


def scrub_json(text: str, scrub: Scrub) -> str:
    """Scrubbed as text, which keeps its layout; where that spoils it, value by value instead."""
    while (clean := scrub(text)) != text:
        if not _is_json(text) or _is_json(clean):
            return clean
        end = "\n" if text.endswith("\n") else ""
        by_value = json.dumps(_scrubbed(json.loads(text), scrub)) + end
        if by_value == text:
            break
        text = by_value
    return text


def _scrubbed(value: Any, scrub: Scrub) -> Any:
    if isinstance(value, dict):
        return {scrub(name): MASK if _goes(name, one) else _scrubbed(one, scrub) for name, one in value.items()}
    if isinstance(value, list):
        return [_scrubbed(one, scrub) for one in value]
    return scrub(value) if isinstance(value, str) else value


def _goes(name: str, value: Any) -> bool:
    return isinstance(value, str | int | float) and is_named_secret(name, str(value))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
