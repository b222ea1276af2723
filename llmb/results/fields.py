"""Numbers as logs print them, read without ever raising: what is not a number, or absurd, is null."""

import math
import re

NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d{1,3})?|\.\d+|nan|inf(?:inity)?))(?![\w.])"


def field(label: str) -> re.Pattern[str]:
    """The pattern of one `label: number` field; the label is a regular expression, and case does not matter."""
    return re.compile(label + r"\s*[:=]\s*" + NUMBER, re.IGNORECASE)


def number(pattern: re.Pattern[str], text: str) -> float | None:
    """A field's number, which may be nan or inf; null where the field is not there."""
    found = pattern.search(text)
    return float(found[1].replace(",", "")) if found else None


def measure(pattern: re.Pattern[str], text: str) -> float | None:
    """A field's number where only a positive, finite one makes sense, as for seconds and rates."""
    value = number(pattern, text)
    return value if value is not None and 0 < value < math.inf else None
