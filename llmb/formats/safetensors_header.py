"""Read and validate the header of a safetensors file, without reading the tensors.

A file is 8 bytes (the length of the header), the header (JSON: dtype, shape and offsets of each tensor) and the
tensors, which are contiguous.
"""

import json
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from llmb.config.serialization import open_regular_file

MAX_HEADER_BYTES = 100_000_000  # limit of the format
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BF16": 16, "C64": 64}
BITS |= {f"{kind}{bits}": bits for kind in "IUF" for bits in (8, 16, 32, 64)}


@dataclass
class ShardHeader:
    """Contents of a file by its header. Faults are pairs: a kind, and a sentence without the file's name."""

    size: int
    tensors: dict[str, int] = field(default_factory=dict)  # bytes of each
    faults: list[tuple[str, str]] = field(default_factory=list)

    @property
    def readable(self) -> bool:
        """Return whether the header could be parsed, whatever else is wrong."""
        return bool(self.tensors) or not self.faults


def read_shard_header(path: Path) -> ShardHeader:
    """Read a header and compare it with the file."""
    shard = ShardHeader(path.stat().st_size)
    with open_regular_file(path) as file:
        start = file.read(8)
        if start == b"version ":
            shard.faults.append(("short", "is a Git LFS pointer and not the weights; fetch them with: git lfs pull"))
            return shard
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            shard.faults.append(("short", f"{shard.size} bytes hold no header"))
        elif length > MAX_HEADER_BYTES:
            shard.faults.append(("corrupted", "does not begin like a safetensors file"))
        elif 8 + length > shard.size:
            shard.faults.append(("short", f"ends within its header of {length} bytes"))
        else:
            _read_header(file.read(length), shard.size - 8 - length, shard)
    return shard


def _read_header(text: bytes, data_bytes: int, shard: ShardHeader) -> None:
    try:
        entries = _entries(text)
        offsets = {name: _offsets(entry) for name, entry in entries.items()}
        sizes = {name: _bytes_of(entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        shard.faults.append(("corrupted", "its header is not one of a safetensors file"))
        return
    shard.tensors = {name: end - begin for name, (begin, end) in offsets.items()}
    mismatched = [name for name, size in sizes.items() if size not in (None, shard.tensors[name])]
    if mismatched:
        shard.faults.append(
            ("corrupted", f"{summarize_names(mismatched)} with another number of bytes than their shape has")
        )
    in_order = sorted(offsets.items(), key=lambda item: item[1])
    ends = accumulate((end for _, (_, end) in in_order), max, initial=0)
    misplaced = [name for (name, (begin, _)), end in zip(in_order, ends, strict=False) if begin != end]
    if misplaced:
        shard.faults.append(
            ("corrupted", f"{summarize_names(misplaced)} with a gap before them or over another's bytes")
        )
    needed = max((end for _, end in offsets.values()), default=0)
    if needed != data_bytes:
        kind = "short" if data_bytes < needed else "long"
        shard.faults.append((kind, f"{abs(needed - data_bytes)} bytes too {kind} for the tensors of its header"))


def _entries(text: bytes) -> dict[str, Any]:
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("not a mapping")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _offsets(entry: Any) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError("invalid data_offsets")
    return begin, end


def _bytes_of(entry: Any) -> int | None:
    """Return the bytes by dtype and shape; None for an unknown dtype."""
    bits, shape = BITS.get(entry["dtype"]), entry["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("no shape")
    return None if bits is None else prod(shape) * bits // 8


def summarize_names(names: list[str]) -> str:
    """Return the number of tensors, and the first few names."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(sorted(names)[:3])}{more})"
