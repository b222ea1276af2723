"""NCCL traces (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL): calls and bytes of each collective.

    [7] NCCL INFO AllReduce: opCount 2 sendbuff 0x7f... recvbuff 0x7f... count 1 datatype 1 op 0 root 0
        comm 0x55556b100660 [nranks=128] stream 0x5555630c58b0                                  (one line in the log)

Such a log has millions of lines but few kinds of them, so each kind is parsed once and the rest is counting. What every
line must still pass through is one regular expression, and its shape decides the speed:

- One group: `findall` then gives plain bytes, which are counted at half the price of tuples. The operation's name
  stands before the addresses and all else behind them, so one group cannot hold both; instead each of the six common
  operations begins its capture at another letter of the word "count", and that beginning tells the operation.
- `.{21}` skips without looking; no torn line can hide behind it, as the next line's own "opCount" ends later.
- Possessive repeats: nothing that was skipped ever needs to be given back.

A head that cannot be followed to a valid tail this way (another operation, a torn line, two ranks writing at once)
gives a capture that does not parse, and then its block is read again line by line.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from llmb.events import CollectiveSeen, Event, LogProblem
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_lines import LINE_BYTES, clean, open_log, tail_lines

SIGNATURE = rb"NCCL INFO \w+: opCount"

# ncclDataType_t: the number in the log -> its name and its bytes
DATATYPES = {
    0: ("int8", 1),
    1: ("uint8", 1),
    2: ("int32", 4),
    3: ("uint32", 4),
    4: ("int64", 8),
    5: ("uint64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float64", 8),
    9: ("bfloat16", 2),
    10: ("fp8e4m3", 1),
    11: ("fp8e5m2", 1),
}

BLOCK_BYTES = 256 << 10  # stays in a core's own cache; also what is read again when a line is torn
PARALLEL_BYTES = 64 << 20  # below this, more processes cost more than they save
WORKERS = 4  # at most: a login node has other users
PARTS_EACH = 4  # so that a worker whose core is taken away holds up nobody
NEWLINE = ord("\n")
MANY_KINDS = 100_000  # fold what was counted so far: a log of ever new sizes must not fill the memory

Call = tuple[str, int, int, int]  # operation, count, datatype, ranks

# operation -> the way from its opCount to its capture, and what the capture then begins with
_CAPTURES = {
    "AllReduce": (rb"[^t]*+t ", b""),
    "AllGather": (rb"[^t]*+t", b" "),
    "ReduceScatter": (rb"[^t]*+", b"t "),
    "Broadcast": (rb"[^o]*+ou", b"nt "),
    "Send": (rb"[^o]*+o", b"unt "),
    "Recv": (rb"[^o]*+", b"ount "),
}
_OPERATIONS = {begin: name for name, (_, begin) in _CAPTURES.items()}
_WAYS = b"|".join(name.encode() + rb": o.{21}+" + way for name, (way, _) in _CAPTURES.items())
_FAST = re.compile(rb"INFO (?:" + _WAYS + rb"|\w++: opCount)(.{,48}+[^\]]*+)", re.DOTALL)
_REST = rb"(\d{1,18}) datatype (\d{1,3}) op \d{1,9} root \d{1,9} comm \w{1,20} \[nranks=(\d{1,9})"
_KIND = re.compile(rb"(" + b"|".join(_OPERATIONS) + rb")" + _REST)

_HEAD = re.compile(rb"INFO (\w+): opCount")
_TAIL = re.compile(rb"t " + _REST + rb"\]")


@dataclass
class Tally:
    """Number of calls of each kind, and of lines that begin like a call and end otherwise."""

    calls: Counter[Call] = field(default_factory=Counter)
    torn: int = 0

    def add(self, tally_part: "Tally") -> None:
        self.calls.update(tally_part.calls)
        self.torn += tally_part.torn

    def add_line(self, line: bytes | bytearray) -> None:
        """Count the calls of one line, each by itself where two were interleaved."""
        _, *parts = _HEAD.split(line)
        for operation, remainder in zip(parts[::2], parts[1::2], strict=True):
            if match := _TAIL.search(remainder):
                count, datatype, ranks = map(int, match.groups())
                self.calls[operation.decode(), count, datatype, ranks] += 1
            else:
                self.torn += 1

    def collectives(self) -> list[CollectiveSeen]:
        """Return an event for each operation, datatype and communicator size, most bytes first."""
        calls: Counter[tuple[str, int, int]] = Counter()
        elements: Counter[tuple[str, int, int]] = Counter()
        for (operation, count, datatype, ranks), times in self.calls.items():
            calls[operation, datatype, ranks] += times
            elements[operation, datatype, ranks] += times * count
        events = []
        for (operation, datatype, ranks), times in calls.items():
            name, size = DATATYPES.get(datatype, (f"datatype {datatype}", None))
            total = None if size is None else size * elements[operation, datatype, ranks]
            events.append(CollectiveSeen(operation=operation, calls=times, bytes=total, datatype=name, ranks=ranks))
        return sorted(events, key=lambda e: (-(e.bytes or 0), e.operation, e.datatype, e.ranks))

    def events(self) -> Iterator[CollectiveSeen | LogProblem]:
        """Yield the collectives, and what could not be read."""
        yield from self.collectives()
        if self.torn:
            yield LogProblem(problem="torn line of a collective", count=self.torn)


def read(lines: Iterable[bytes | str]) -> Iterator[Event]:
    """Yield the collectives of a trace given line by line, then the outcome of the run."""
    tallied, outcome = Tally(), LogOutcome("no collective lines")
    for line in clean(lines):
        tallied.add_line(line.text.encode())
        outcome.scan(line)
    yield from tallied.events()
    yield from outcome.events(finished=bool(tallied.calls))


def read_file(path: Path) -> Iterator[Event]:
    """Yield the collectives of a trace of any size, then the outcome as the last lines of the file tell it."""
    tallied, outcome = tally(path), LogOutcome("no collective lines")
    for line in clean(tail_lines(path)):
        outcome.scan(line)
    yield from tallied.events()
    yield from outcome.events(finished=bool(tallied.calls))


def summarize(path: Path) -> list[CollectiveSeen]:
    """Return all collectives of a trace, counted exactly."""
    return tally(path).collectives()


def tally(path: Path) -> Tally:
    """Count every call in a file, in several processes if it is large."""
    with open_log(path) as log:
        size = os.fstat(log.fileno()).st_size
        workers = min(WORKERS, _cores())
        if size < PARALLEL_BYTES or workers == 1:
            return _tally_range(path, 0, size)
        parts = workers * PARTS_EACH
        cuts = [0, *(_next_line(log, size * part // parts) for part in range(1, parts)), size]
    # Imported here, as most logs are small. Forked, so that a worker starts in a millisecond.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    total = Tally()
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for tallied in pool.map(_tally_range, [path] * parts, cuts[:-1], cuts[1:]):
            total.add(tallied)
    return total


def _cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _next_line(log: BinaryIO, offset: int) -> int:
    """Return the start of the first line after an offset."""
    log.seek(offset)
    log.readline(LINE_BYTES)
    return log.tell()


def _tally_range(path: Path, start: int, stop: int) -> Tally:
    tallied, kinds = Tally(), Counter[bytes]()
    for buffer, length in _blocks(path, start, stop):
        before = len(kinds)
        captures = _FAST.findall(buffer, 0, length)
        kinds.update(captures)
        new = list(islice(reversed(kinds), len(kinds) - before))
        if not all(map(_call, new)) or buffer[length - 1] != NEWLINE:
            kinds.subtract(captures)
            for kind in new:
                del kinds[kind]
            for line in buffer[:length].split(b"\n"):
                tallied.add_line(line)
        if len(kinds) > MANY_KINDS:
            _fold(kinds, tallied)
    _fold(kinds, tallied)
    return tallied


def _blocks(path: Path, start: int, stop: int) -> Iterator[tuple[bytearray, int]]:
    """Yield blocks of whole lines of a range of a file, all in one buffer: each is valid until the next."""
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    pending = 0
    with open_log(path).detach() as log:
        log.seek(start)
        while count_read := log.readinto(view[pending : pending + max(0, stop - log.tell())]):
            end = pending + count_read
            whole = buffer.rfind(b"\n", 0, end) + 1 or end
            yield buffer, whole
            pending = end - whole
            view[:pending] = view[whole:end]
    if pending:
        yield buffer, pending


def _fold(kinds: Counter[bytes], tallied: Tally) -> None:
    """Add up the captures and clear them."""
    for kind, times in kinds.items():
        call = _call(kind)
        assert call is not None, "only valid captures are kept"
        tallied.calls[call] += times
    kinds.clear()


@lru_cache(MANY_KINDS)
def _call(captured: bytes) -> Call | None:
    """Parse a capture; None if the line is damaged."""
    if match := _KIND.fullmatch(captured):
        begin, count, datatype, ranks = match.groups()
        return _OPERATIONS[begin], int(count), int(datatype), int(ranks)
    return None
