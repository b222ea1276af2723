"""Lookup of GPUs: peak FLOP/s per dtype, memory, bandwidths, links between GPUs, and the source of the figures.

Peaks are dense (no structured sparsity), in FLOP/s. A new GPU is one row in `gpu_types/`. Unpublished figures are null:
an MFU against a guessed peak would be worse than none. A GPU without a row runs too, under its driver's name (tesla-t4,
rtx-4080): its peaks are null, its memory is what the driver reports, its ceilings are what `llmb-run probe` measured.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmb.errors import ConfigError
from llmb.perfmodel.gpu_types.datacenter_rows import DATACENTER
from llmb.perfmodel.gpu_types.gpu_row import GB, GIB, TERA, Fabric, Gpu
from llmb.perfmodel.gpu_types.graphics_rows import GRAPHICS

if TYPE_CHECKING:  # spec.py is slow to import
    from llmb.config.spec import Machine

__all__ = [
    "GB", "GIB", "GPUS", "TERA", "UNLISTED", "Fabric", "Gpu", "gpu", "gpu_key", "identify_gpu", "is_listed",
    "lacks_fp8", "memory_bytes", "parse_gpu_type", "peak_flops", "with_article",
]  # fmt: skip

CPU = Gpu(key="cpu", title="this machine's CPU", gpus_per_node=1024, source="no published peak: MFU is null")
GPUS: dict[str, Gpu] = {gpu.key: gpu for gpu in (*DATACENTER, *GRAPHICS, CPU)}

UNLISTED = "unlisted:"  # --gpu-type unlisted:t4: so that a misspelt type is not taken for a GPU without a row
KEY = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")  # part of file names
# Words of a device name that say nothing about peaks: maker, form factor, kind of memory, cooling.
NEUTRAL_WORD = re.compile(r"nvidia|geforce|sxm\d?|hbm\d?e?|ac|lc")
MEMORY_WORD = re.compile(r"(\d+)gb")
MEMORY_TOLERANCE = 0.1  # nominal sizes are rounded: 141 GB, 139 GiB


def is_listed(key: str) -> bool:
    """Return whether a GPU type has a row in the table."""
    return key in GPUS


def gpu(key: str) -> Gpu:
    """Return the row of one GPU type; for a GPU that is not in the table, a row of nulls."""
    unlisted = "not in the table of GPUs: peaks, bandwidths and MFU are null"
    return GPUS[key] if is_listed(key) else Gpu(key=key, title=f"{key} (not in the GPU table)", source=unlisted)


def parse_gpu_type(text: str, more: Iterable[str] = ()) -> str:
    """Return the GPU type that a user names: a row of the table, one of `more`, or `unlisted:NAME`."""
    key = text.strip().lower()
    name = key.removeprefix(UNLISTED)
    if key in GPUS or key in more:
        return key
    if key != name and KEY.fullmatch(name):
        return name
    example = f"{UNLISTED}{name}" if KEY.fullmatch(name) else f"{UNLISTED}NAME"
    raise ConfigError(
        f"unknown GPU type {text!r}; choices are: {', '.join(GPUS)}; name a GPU that is not among them as {example}"
    )


def peak_flops(key: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one GPU for a dtype; None if unpublished."""
    return gpu(key).peak_flops.get(dtype)


def lacks_fp8(key: str) -> bool:
    """Return whether a GPU is known to have no fp8 GEMMs; of one without published peaks its engine decides."""
    peaks = gpu(key).peak_flops
    return bool(peaks) and "fp8" not in peaks


def memory_bytes(machine: "Machine") -> float | None:
    """Return the memory of one GPU: the table's, or else what its driver reported; None if unknown."""
    return gpu(machine.gpu).memory_bytes or machine.gpu_memory_bytes


def identify_gpu(device_name: str, memory_bytes: float | None = None) -> str | None:
    """Return the key for a driver's device name ('NVIDIA H200' -> h200); None for a GPU that is not in the table.

    Variants with another peak or bandwidth (MIG, Ti, Laptop) do not match: every word must be known. `memory_bytes`, as
    the driver reports it, decides between rows of one name and refuses a row with another memory.
    """
    words = set(_words(device_name))
    rows = [
        row
        for row in GPUS.values()
        if row.name_words and words >= set(row.name_words) and all(_describes(word, row) for word in words)
    ]
    if memory_bytes is not None:
        rows = [row for row in rows if _has_memory(row, memory_bytes)]
    return max(rows, key=lambda row: (len(row.name_words), row.memory_bytes or 0.0)).key if rows else None


def gpu_key(device_name: str, memory_bytes: float | None = None) -> str:
    """Return the GPU type of a device: its key in the table, or else its name ('Tesla T4' -> tesla-t4).

    A GPU that has the name of a row and another memory is named after both ('NVIDIA H20' of 141 GB -> h20-141gb).
    """
    key = identify_gpu(device_name, memory_bytes)
    if key is not None:
        return key
    words = [word for word in _words(device_name) if word not in ("nvidia", "geforce")]
    name = re.sub(r"[^a-z0-9.-]", "", "-".join(words))[:40].strip("-.") or "gpu"
    return f"{name}-{memory_bytes / GB:.0f}gb" if is_listed(name) and memory_bytes else name


def with_article(gpu: str) -> str:
    """Return a GPU type with the article it is spoken with: an h100, a b200, an rtx-4090."""
    return f"{'an' if gpu[:1] in 'aefhilmnorsx8' else 'a'} {gpu}"


def _words(device_name: str) -> list[str]:
    return re.sub(r"(\d+) gb\b", r"\1gb", re.sub(r"[-_ ]+", " ", device_name.lower())).split()


def _describes(word: str, row: Gpu) -> bool:
    """Return whether a word of a device name is true of the row: its own, neutral, or its memory size."""
    size = MEMORY_WORD.fullmatch(word)
    if word in row.name_words or word in row.more_words:
        return True
    return _has_memory(row, int(size[1]) * GB) if size else NEUTRAL_WORD.fullmatch(word) is not None


def _has_memory(row: Gpu, memory_bytes: float) -> bool:
    return row.memory_bytes is not None and abs(memory_bytes / row.memory_bytes - 1) < MEMORY_TOLERANCE
