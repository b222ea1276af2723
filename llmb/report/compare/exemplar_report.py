"""Outcome of an exemplar suite: a line per row, JSON, and junit XML for CI."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from llmb.config.serialization import to_plain
from llmb.report.table import number, render
from llmb.results.compare.exemplar_suite import Check
from llmb.results.result import Result


@dataclass(frozen=True, kw_only=True)
class RowOutcome:
    """A row that ran; `result` is None where there is none."""

    name: str
    result: Result | None
    seconds: float | None  # of the run, from start to end; null: it ran earlier
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return self.result is not None and self.result.status == "ok" and all(check.holds for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """Clauses that say why the row fails."""
        if self.result is None:
            return ["no run of this configuration"]
        if self.result.status != "ok":
            return [f"{self.result.status}: {self.result.reason or 'no reason recorded'}"]
        return [describe(check) for check in self.checks if not check.holds]


def describe(check: Check) -> str:
    """Return a threshold and what was measured."""
    limits = [f"at least {number(check.min)}"] if check.min is not None else []
    limits += [f"at most {number(check.max)}"] if check.max is not None else []
    measured = "is unknown" if check.measured is None else number(check.measured)
    return f"{check.figure} {measured}, {' and '.join(limits)}"


def suite_text(suite: str, outcomes: Sequence[RowOutcome]) -> str:
    """Return the table of rows and a last line with the counts."""
    rows = [
        (
            "pass" if o.passed else "FAIL",
            o.name,
            "; ".join(map(describe, o.checks)) if o.passed else "; ".join(o.reasons),
        )
        for o in outcomes
    ]
    failed = sum(not outcome.passed for outcome in outcomes)
    last = f"{suite}: {len(outcomes) - failed} of {len(outcomes)} rows pass"
    return f"{render(('', 'row', 'thresholds'), rows)}\n\n{last}"


def suite_data(suite: str, outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Return the outcome as plain data."""
    rows = [
        {
            "name": o.name,
            "passed": o.passed,
            "status": o.result.status if o.result else None,
            "reasons": o.reasons,
            "seconds": o.seconds,
            "checks": [{**to_plain(check), "holds": check.holds} for check in o.checks],
        }
        for o in outcomes
    ]
    return {"suite": suite, "passed": all(o.passed for o in outcomes), "rows": rows}


def suite_junit(suite: str, outcomes: Sequence[RowOutcome]) -> str:
    """Return junit XML: a test case per row."""
    failed = sum(not outcome.passed for outcome in outcomes)
    counts = {"tests": str(len(outcomes)), "failures": str(failed), "errors": "0"}
    root = ElementTree.Element("testsuites")
    total = sum(outcome.seconds or 0.0 for outcome in outcomes)
    element = ElementTree.SubElement(root, "testsuite", {"name": suite, "time": f"{total:.3f}", **counts})
    for outcome in outcomes:
        attributes = {"classname": suite, "name": outcome.name, "time": f"{outcome.seconds or 0.0:.3f}"}
        case = ElementTree.SubElement(element, "testcase", attributes)
        if not outcome.passed:
            ElementTree.SubElement(case, "failure", {"message": "; ".join(outcome.reasons)})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
