"""Outcome of an A/B test in words: "no difference larger than 0.6 % in tokens/s"."""

from typing import Any

from llmb.config.serialization import to_plain
from llmb.report.table import number
from llmb.results.compare.paired_test import Look, PairedTest


def verdict(test: PairedTest, unit: str) -> str:
    """Return the outcome in one sentence."""
    look = test.last
    if test.outcome == "different":
        percent = f"by {100 * abs(look.ratio - 1):.2f} % in {unit}"
        return f"B is {'faster' if look.ratio > 1 else 'slower'}, {percent}"
    text = f"no difference larger than {100 * look.largest_difference:.2f} % in {unit}"
    if test.outcome == "undecided":
        text += "; the noise floor was not reached: more pairs (--repeats) or longer runs would narrow it"
    return text


def look_line(look: Look) -> str:
    """Return the ratio after some pairs."""
    interval = f"{number(look.low)} to {number(look.high)}"
    return (
        f"after {look.pairs} pairs: speed of B over A {number(look.ratio)} ({100 * look.confidence:.1f} % {interval})"
    )


def ab_text(test: PairedTest, unit: str, doubts: list[str]) -> str:
    """Return A against itself, the last look, how errors are controlled, and the verdict."""
    itself = test.itself
    lines = [
        f"A against itself, {itself.pairs} pairs: {number(itself.ratio)} (95 % {number(itself.low)} to "
        f"{number(itself.high)}); noise floor {100 * test.floor:.2f} %",
        look_line(test.last),
        f"looks at the data: {len(test.looks)}; all their intervals hold together in 95 % of tests (union bound)",
    ]
    if itself.differs:
        doubts = ["A differs from itself: the machine changed during the test; let it settle, then repeat", *doubts]
    against = "; but\n" + "\n".join(f"- {doubt}" for doubt in doubts) if doubts else ""
    return "\n".join(lines) + f"\n\nverdict: {verdict(test, unit)}{against}"


def ab_data(test: PairedTest, unit: str, doubts: list[str], names: tuple[str, str]) -> dict[str, Any]:
    """Return the test as plain data."""
    plain: dict[str, Any] = to_plain(test)
    return {"a": names[0], "b": names[1], "unit": unit, "verdict": verdict(test, unit), "doubts": doubts, **plain}
