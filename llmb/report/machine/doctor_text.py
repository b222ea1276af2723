"""Text of doctor: one line for each thing looked at, what to do below it, and nodes that differ from the others."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Line(Protocol):
    """One finding."""

    @property
    def topic(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def remedy(self) -> str | None: ...


class Difference(Protocol):
    """A fact in which nodes differ."""

    @property
    def fact(self) -> str: ...
    @property
    def usual(self) -> str | None: ...
    @property
    def nodes(self) -> dict[str, str]: ...


def describe_machine(findings: Sequence[Line]) -> str:
    """Return the lines of one machine, and how many are not ok."""
    return "\n".join([*finding_lines(findings), "", count_line(findings)])


def finding_lines(findings: Iterable[Line]) -> list[str]:
    """Return `level  topic  text`, and what to do on a line below."""
    listed = list(findings)
    width = max((len(finding.topic) for finding in listed), default=0)
    lines = []
    for finding in listed:
        lines.append(f"{finding.level:<8} {finding.topic:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    return lines


def count_line(findings: Iterable[Line]) -> str:
    """Return the number of problems and warnings."""
    levels = [finding.level for finding in findings]
    counted = [f"{n} {level}{'s' if n > 1 else ''}" for level in ("problem", "warning") if (n := levels.count(level))]
    return ", ".join(counted) or "nothing to do"


def describe_nodes(
    nodes: Mapping[str, Sequence[Line]],
    odd: Sequence[Difference],
    silent: Mapping[str, str],
    not_asked: Sequence[tuple[str, str]],
) -> str:
    """Return what is not ok, nodes with the same findings together, and then nodes that differ."""
    groups: dict[tuple[tuple[str, str, str, str | None], ...], list[str]] = {}
    for name, findings in nodes.items():
        bad = tuple((f.topic, f.level, f.text, f.remedy) for f in findings if f.level != "ok")
        groups.setdefault(bad, []).append(name)
    by_lines = {tuple(names): [f for f in nodes[names[0]] if f.level != "ok"] for names in groups.values()}
    blocks = []
    for names, bad_findings in by_lines.items():
        lines = finding_lines(bad_findings) or ["ok       nothing to do"]
        blocks.append(f"{', '.join(names)}:\n" + "\n".join(f"  {line}" for line in lines))
    lines = [f"problem  {name} did not answer: {text}" for name, text in silent.items()]
    for difference in odd:
        others = ", ".join(f"{name} {value}" for name, value in difference.nodes.items())
        usual = f"; the others {difference.usual}" if difference.usual is not None else ""
        lines.append(f"differs  {difference.fact}: {others}{usual}")
    lines += [f"not examined: {name}, {state}" for name, state in not_asked]
    blocks.append("\n".join(lines) or f"all {len(nodes)} nodes are alike")
    return "\n\n".join(blocks)
