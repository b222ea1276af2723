"""Registry of log readers, and detection of the one that a log needs.

    for event in read_log(Path("log-pretrain.out")): ...

A reader is a file beside this one with two names: SIGNATURE, a pattern of its logs alone, and read, which turns
lines into events and ends with a RunEnded. A format that needs the file rather than its lines has read_file too.
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
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_lines import BLOCK_BYTES, file_lines, open_log

SCAN_BYTES = 1 << 20  # at each end of a file, before all of it is scanned


@dataclass(frozen=True)
class Reader:
    """One log format: its signature and its reader."""

    signature: bytes
    read: Callable[[Iterable[bytes | str]], Iterator[Event]]
    read_file: Callable[[Path], Iterator[Event]] | None = None

    def events(self, path: Path) -> Iterator[Event]:
        return self.read_file(path) if self.read_file else self.read(file_lines(path))


# The order decides where a log contains several. NCCL traces inside a training log are added to it.
READERS: dict[str, Reader] = {
    "nemo": Reader(nemo_log.SIGNATURE, nemo_log.read),
    "megatron_bridge": Reader(megatron_bridge_log.SIGNATURE, megatron_bridge_log.read),
    "torchtitan": Reader(torchtitan_log.SIGNATURE, torchtitan_log.read),
    "trtllm": Reader(trtllm_log.SIGNATURE, trtllm_log.read),
    "vllm": Reader(vllm_log.SIGNATURE, vllm_log.read),
    "nccl": Reader(nccl_log.SIGNATURE, nccl_log.read, nccl_log.read_file),
}
_SIGNATURES = {name: re.compile(reader.signature) for name, reader in READERS.items()}
# The literal text that each signature begins with: bytes.find is four times as fast as a search of the pattern.
_BEGINNINGS = {name: re.split(rb"[\\\[]", reader.signature)[0] for name, reader in READERS.items()}
_SIGNATURE_BYTES = 256  # no sign is longer, so blocks overlap by this much


def detect(path: Path) -> str | None:
    """Return the reader that a log needs by its content, or None."""
    return next(iter(log_formats(path)), None)


def log_formats(path: Path) -> list[str]:
    """Return the formats found at the ends of a file, or else anywhere in it, in the order of READERS."""
    with open_log(path) as log:
        size = os.fstat(log.fileno()).st_size
        ends = [(0, min(SCAN_BYTES, size)), (max(SCAN_BYTES, size - SCAN_BYTES), size)]
        for ranges in (ends, [(SCAN_BYTES, size - SCAN_BYTES)]):
            formats = {name for start, stop in ranges for name in _signatures(log, start, stop)}
            if formats:
                return [name for name in READERS if name in formats]
    return []


def _signatures(log: BinaryIO, start: int, stop: int) -> Iterator[str]:
    """Yield the formats whose signature occurs in a range of a file."""
    log.seek(start)
    last = b""
    while start < stop and (block := log.read(min(BLOCK_BYTES, stop - start))):
        start += len(block)
        block = last + block
        for name, signature in _SIGNATURES.items():
            if _BEGINNINGS[name] in block and signature.search(block):
                yield name
        last = block[-_SIGNATURE_BYTES:]


def read_log(path: Path, reader: str | None = None) -> Iterator[Event]:
    """Yield every event of a log of another engine; of an unknown format only failures."""
    return read_formats(path, [check_reader(reader)] if reader else log_formats(path))


def check_reader(reader: str) -> str:
    """Return the name of a reader, or raise one clear line."""
    if reader not in READERS:
        raise UnknownName("reader", reader, READERS)
    return reader


def read_formats(path: Path, formats: list[str]) -> Iterator[Event]:
    """Yield every event of a log of these formats, as `log_formats` returns them."""
    if "nccl" in formats[1:]:
        yield from nccl_log.tally(path).events()
    yield from READERS[formats[0]].events(path) if formats else _failure(path)


def _failure(path: Path) -> Iterator[Event]:
    outcome = LogOutcome()
    for _ in outcome.scanned(file_lines(path), ()):
        pass
    yield from outcome.events(finished=False)
