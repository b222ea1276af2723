"""One safetensors file as its header describes it, and what of that is not so. Only the header is read.

A file is 8 bytes (the length of the header), the header (JSON: type, shape and place of each tensor) and the tensors,
which lie side by side without gaps.
"""

import json
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

LONGEST_HEADER = 100_000_000  # bytes: the format allows no more
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BF16": 16, "C64": 64}
BITS |= {f"{kind}{bits}": bits for kind in "IUF" for bits in (8, 16, 32, 64)}


@dataclass
class Shard:
    """What a file says that it holds. Faults are pairs: a kind, and a sentence without the file's name."""

    size: int
    tensors: dict[str, int] = field(default_factory=dict)  # bytes of each
    faults: list[tuple[str, str]] = field(default_factory=list)

    @property
    def readable(self) -> bool:
        """Whether the header could be made out, whatever else is wrong."""
        return bool(self.tensors) or not self.faults


def inspect(path: Path) -> Shard:
    """Read a header and hold it against the file."""
    shard = Shard(path.stat().st_size)
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            shard.faults.append(("short", "is a Git LFS pointer and not the weights; fetch them with: git lfs pull"))
            return shard
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            shard.faults.append(("short", f"{shard.size} bytes hold no header"))
        elif length > LONGEST_HEADER:
            shard.faults.append(("corrupted", "does not begin like a safetensors file"))
        elif 8 + length > shard.size:
            shard.faults.append(("short", f"ends within its header of {length} bytes"))
        else:
            _read_header(file.read(length), shard.size - 8 - length, shard)
    return shard


def _read_header(text: bytes, data_bytes: int, shard: Shard) -> None:
    try:
        entries = _entries(text)
        places = {name: _place(entry) for name, entry in entries.items()}
        sizes = {name: _bytes_of(entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        shard.faults.append(("corrupted", "its header is not one of a safetensors file"))
        return
    shard.tensors = {name: end - begin for name, (begin, end) in places.items()}
    wrong = [name for name, size in sizes.items() if size not in (None, shard.tensors[name])]
    if wrong:
        shard.faults.append(("corrupted", f"{some(wrong)} with another number of bytes than their shape has"))
    in_order = sorted(places.items(), key=lambda item: item[1])
    ends = accumulate((end for _, (_, end) in in_order), max, initial=0)
    torn = [name for (name, (begin, _)), end in zip(in_order, ends, strict=False) if begin != end]
    if torn:
        shard.faults.append(("corrupted", f"{some(torn)} with a gap before them or over another's bytes"))
    needed = max((end for _, end in places.values()), default=0)
    if needed != data_bytes:
        kind = "short" if data_bytes < needed else "long"
        shard.faults.append((kind, f"{abs(needed - data_bytes)} bytes too {kind} for the tensors of its header"))


def _entries(text: bytes) -> dict[str, Any]:
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("not a mapping")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _place(entry: Any) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError("no place in a file")
    return begin, end


def _bytes_of(entry: Any) -> int | None:
    """From type and shape; None for a type that is not known here."""
    bits, shape = BITS.get(entry["dtype"]), entry["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("no shape")
    return None if bits is None else prod(shape) * bits // 8


def some(names: list[str]) -> str:
    """How many tensors, and the first few."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(sorted(names)[:3])}{more})"
