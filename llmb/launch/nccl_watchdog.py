"""Collective timeouts from torch's NCCL watchdog: which collective, and which ranks kept the others waiting.

Every rank that waits reports the collective, and how many it has enqueued. Late are those that have enqueued fewer than
others of their group, or that had started, reported nothing and recorded no end.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

_TIMEOUT = re.compile(
    r"^(?P<before>.*)Watchdog caught collective operation timeout: \w+\(SeqNum=\d+, OpType=(?P<operation>\w+)"
    r".*?Timeout\(ms\)=(?P<limit>\d+)",
    re.MULTILINE,
)
_LAST_ENQUEUED = re.compile(
    r"^(?P<before>.*\[PG (?P<group>[^\]\n]*?) ?Rank \d+\]).*last enqueued NCCL work: (?P<enqueued>\d+)", re.MULTILINE
)
_GLOBAL_RANK = re.compile(r"\[rank(\d+)\]")
_RANK = re.compile(r"Rank (\d+)\]")  # within the group, the only one that old versions print


@dataclass(frozen=True)
class CollectiveTimeout:
    """Collective that timed out."""

    operation: str  # ALLREDUCE
    limit_s: float
    waiting: tuple[int, ...]  # ranks that reported it
    late: tuple[int, ...]  # those they waited for, as far as known


def collective_timeout(log: str, silent: Collection[int] = ()) -> CollectiveTimeout | None:
    """Return the first timeout in the log. `silent`: ranks that had started and recorded no end."""
    reports = list(_TIMEOUT.finditer(log))
    if not reports:
        return None
    waiting = {rank for report in reports if (rank := _rank(report["before"])) is not None}
    late = _ranks_behind(log) or set(silent) - waiting
    first = reports[0]
    return CollectiveTimeout(
        operation=first["operation"],
        limit_s=int(first["limit"]) / 1000,
        waiting=tuple(sorted(waiting - late)),
        late=tuple(sorted(late)),
    )


def _ranks_behind(log: str) -> set[int]:
    """Return the ranks that have enqueued fewer collectives than most of their group."""
    groups: dict[str, dict[int, int]] = {}
    for report in _LAST_ENQUEUED.finditer(log):
        rank = _rank(report["before"])
        if rank is not None:
            groups.setdefault(report["group"], {}).setdefault(rank, int(report["enqueued"]))
    late: set[int] = set()
    for counts in groups.values():
        behind = {rank for rank, count in counts.items() if count < max(counts.values())}
        if 2 * len(behind) < len(counts):
            late |= behind
    return late


def _rank(text: str) -> int | None:
    ranks = _GLOBAL_RANK.findall(text) or _RANK.findall(text)
    return int(ranks[-1]) if ranks else None
