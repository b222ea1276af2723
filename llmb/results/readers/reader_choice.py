"""The readers of foreign logs by name, and which one a log needs.

    for event in read_log(Path("log-pretrain.out")): ...

A reader is a file beside this one with two names: SIGN, a pattern that only its logs hold, and read, which turns lines
into events and ends with a RunEnded. A format that needs the file itself rather than its lines has read_file too.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmb.errors import UnknownName
from llmb.events import Event
from llmb.results.readers import megatron_bridge_log, nccl_log, nemo_log, torchtitan_log, trtllm_log, vllm_log
from llmb.results.readers.log_ending import Ending
from llmb.results.readers.log_lines import BLOCK_BYTES, clean, file_lines, opened

LOOK_BYTES = 1 << 20  # at each end of a file, before all of it is looked through


@dataclass(frozen=True)
class Reader:
    """One format: how its logs are known, and how they are read."""

    sign: bytes
    read: Callable[[Iterable[bytes | str]], Iterator[Event]]
    read_file: Callable[[Path], Iterator[Event]] | None = None

    def events(self, path: Path) -> Iterator[Event]:
        return self.read_file(path) if self.read_file else self.read(file_lines(path))


# The order decides where a log holds several. A training log may trace its collectives too: those are then added.
READERS: dict[str, Reader] = {
    "nemo": Reader(nemo_log.SIGN, nemo_log.read),
    "megatron_bridge": Reader(megatron_bridge_log.SIGN, megatron_bridge_log.read),
    "torchtitan": Reader(torchtitan_log.SIGN, torchtitan_log.read),
    "trtllm": Reader(trtllm_log.SIGN, trtllm_log.read),
    "vllm": Reader(vllm_log.SIGN, vllm_log.read),
    "nccl": Reader(nccl_log.SIGN, nccl_log.read, nccl_log.read_file),
}
_SIGNS = {name: re.compile(reader.sign) for name, reader in READERS.items()}
_SIGN_BYTES = 256  # no sign is longer, so blocks overlap by this much


def detect(path: Path) -> str | None:
    """Which reader a log needs, told from its content; none where no sign of any is found."""
    return next(iter(_formats(path)), None)


def _formats(path: Path) -> list[str]:
    """The formats found at a file's ends, or else anywhere in it, in the order of the table."""
    with opened(path) as log:
        size = os.fstat(log.fileno()).st_size
        ends = [(0, min(LOOK_BYTES, size)), (max(LOOK_BYTES, size - LOOK_BYTES), size)]
        for ranges in (ends, [(LOOK_BYTES, size - LOOK_BYTES)]):
            found = {name for start, stop in ranges for name in _signs(log, start, stop)}
            if found:
                return [name for name in READERS if name in found]
    return []


def _signs(log: BinaryIO, start: int, stop: int) -> Iterator[str]:
    """The signs within a range of a file."""
    log.seek(start)
    last = b""
    while start < stop and (block := log.read(min(BLOCK_BYTES, stop - start))):
        start += len(block)
        block = last + block
        yield from (name for name, sign in _SIGNS.items() if sign.search(block))
        last = block[-_SIGN_BYTES:]


def read_log(path: Path, reader: str | None = None) -> Iterator[Event]:
    """Every event of a foreign log. Where no format is recognised, what it says of a failure is still read."""
    if reader is not None and reader not in READERS:
        raise UnknownName("reader", reader, READERS)
    return _events(path, [reader] if reader else _formats(path))


def _events(path: Path, formats: list[str]) -> Iterator[Event]:
    if "nccl" in formats[1:]:
        yield from nccl_log.tally(path).events()
    yield from READERS[formats[0]].events(path) if formats else _failure(path)


def _failure(path: Path) -> Iterator[Event]:
    ending = Ending()
    for line in clean(file_lines(path)):
        ending.hear(line)
    yield from ending.events(finished=False)
