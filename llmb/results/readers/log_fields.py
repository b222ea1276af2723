"""Numbers as logs print them, read without ever raising: what is not a number, or absurd, is null."""

import re
from collections.abc import Iterable

# Bounded in length, so that no garbage can make the search slow. Thousands separators are allowed.
NUMBER = r"([-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,3})?|\.\d{1,30}|[nN]a[nN]|NAN|[iI]nf|INF))"
_SMALLEST, _LARGEST = 1e-12, 1e18


def field(label: str) -> re.Pattern[str]:
    """The pattern of one `label: number` field; the label is a regular expression, fastest if letters begin it."""
    return re.compile(rf"{label}\s*[:=]\s*{NUMBER}(?![\w.])")


def labelled(labels: Iterable[str]) -> re.Pattern[str]:
    """The pattern of a summary line: one of some labels, perhaps a unit in brackets, a colon, a number."""
    choice = "|".join(re.escape(label) for label in labels)
    return re.compile(rf"(?:^|[\s*])({choice})(?:\s{{0,9}}[\[(][^:]{{0,60}})?\s*:\s*{NUMBER}(?![\w.])", re.IGNORECASE)


def as_number(text: str) -> float:
    """What NUMBER matched, as a number; it may be nan or inf."""
    return float(text.replace(",", ""))


def number(pattern: re.Pattern[str], text: str) -> float | None:
    """A field's number, which may be nan or inf; null where the field is not there."""
    found = pattern.search(text)
    return as_number(found[1]) if found else None


def measure(pattern: re.Pattern[str], text: str) -> float | None:
    """A field's number where only a positive one of sane size makes sense, as for seconds and rates."""
    value = number(pattern, text)
    return value if value is not None and _SMALLEST <= value <= _LARGEST else None
