"""One line of doctor: what was looked at, ok, warning or problem, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line. `warning`: runs work, their figures may not be those of a healthy machine; `problem`: fix it first."""

    topic: str
    level: Level
    text: str
    remedy: str | None = None  # of what is not ok


def ok(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level="ok", text=text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic=topic, level="warning", text=text, remedy=remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic=topic, level="problem", text=text, remedy=remedy)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Return whether any line is a problem."""
    return any(finding.level == "problem" for finding in findings)
