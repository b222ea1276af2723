"""Parsing of numbers in logs, without ever raising: what is not a number, or absurd, is None."""

import re
from collections.abc import Iterable

# Bounded in length, so that no garbage can make the search slow. Thousands separators are allowed.
NUMBER = r"([-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,3})?|\.\d{1,30}|[nN]a[nN]|NAN|[iI]nf|INF))"
_SMALLEST, _LARGEST = 1e-12, 1e18


def field(label: str) -> re.Pattern[str]:
    """Return the pattern of one `label: number` field; the label is a regular expression, best begun with letters."""
    return re.compile(rf"{label}\s*[:=]\s*{NUMBER}(?![\w.])")


def labelled(labels: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a summary line: one of some labels, perhaps a unit in brackets, a colon, a number."""
    choice = "|".join(re.escape(label) for label in labels)
    return re.compile(rf"(?:^|[\s*])({choice})(?:\s{{0,9}}[\[(][^:]{{0,60}})?\s*:\s*{NUMBER}(?![\w.])", re.IGNORECASE)


def as_number(text: str) -> float:
    """Convert what NUMBER matched; it may be nan or inf."""
    return float(text.replace(",", ""))


def number(pattern: re.Pattern[str], text: str) -> float | None:
    """Return a field's number, which may be nan or inf, or None if the field is missing."""
    match = pattern.search(text)
    return as_number(match[1]) if match else None


def measure(pattern: re.Pattern[str], text: str) -> float | None:
    """Return a field's number if positive and of sane size, as for seconds and rates, else None."""
    value = number(pattern, text)
    return value if value is not None and _SMALLEST <= value <= _LARGEST else None
