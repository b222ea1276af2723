"""What torch's NCCL watchdog wrote when a collective did not end: which one, and which ranks kept the others waiting.

Every rank that waits reports the collective, and how many it has begun in all. Late are those that have begun fewer
than others of their group, or that were there, said nothing and left without a last word.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

_TIMED_OUT = re.compile(
    r"^(?P<before>.*)Watchdog caught collective operation timeout: \w+\(SeqNum=\d+, OpType=(?P<operation>\w+)"
    r".*?Timeout\(ms\)=(?P<limit>\d+)",
    re.MULTILINE,
)
_BEGUN = re.compile(
    r"^(?P<before>.*\[PG (?P<group>[^\]\n]*?) ?Rank \d+\]).*last enqueued NCCL work: (?P<begun>\d+)", re.MULTILINE
)
_GLOBAL_RANK = re.compile(r"\[rank(\d+)\]")
_RANK = re.compile(r"Rank (\d+)\]")  # within the group, which in old versions is all that is printed


@dataclass(frozen=True)
class CollectiveTimeout:
    """A collective that did not end in time."""

    operation: str  # ALLREDUCE
    limit_s: float
    waiting: tuple[int, ...]  # ranks that reported it
    late: tuple[int, ...]  # those they waited for, as far as can be told


def collective_timeout(log: str, silent: Collection[int] = ()) -> CollectiveTimeout | None:
    """The first timeout that the log tells of. `silent`: ranks that were there and did not say how they ended."""
    reports = list(_TIMED_OUT.finditer(log))
    if not reports:
        return None
    waiting = {rank for report in reports if (rank := _rank(report["before"])) is not None}
    behind = _behind(log)
    late = behind or set(silent) - waiting
    first = reports[0]
    return CollectiveTimeout(
        operation=first["operation"],
        limit_s=int(first["limit"]) / 1000,
        waiting=tuple(sorted(waiting - late)),
        late=tuple(sorted(late)),
    )


def _behind(log: str) -> set[int]:
    """Ranks that have begun fewer collectives than most of their group."""
    groups: dict[str, dict[int, int]] = {}
    for report in _BEGUN.finditer(log):
        rank = _rank(report["before"])
        if rank is not None:
            groups.setdefault(report["group"], {}).setdefault(rank, int(report["begun"]))
    found: set[int] = set()
    for begun in groups.values():
        behind = {rank for rank, count in begun.items() if count < max(begun.values())}
        if 2 * len(behind) < len(begun):
            found |= behind
    return found


def _rank(text: str) -> int | None:
    found = _GLOBAL_RANK.findall(text) or _RANK.findall(text)
    return int(found[-1]) if found else None
