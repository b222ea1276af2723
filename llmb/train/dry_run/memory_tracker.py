"""Memory of a dry run over time, by purpose.

Every storage is tracked from the operation that creates it until it is freed. Allocations and frees are logged as they
happen, and storages may be labelled at any later time, so the peak is broken down only after the run. Sizes are rounded
up as by the CUDA caching allocator. Host memory is counted separately.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes: allocation granularity of the CUDA caching allocator
ACTIVATIONS = "activations"  # label of unclaimed memory


class MemoryTracker:
    """Log of all allocations and frees, with current and peak bytes."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.host_peak = 0  # buffers are reused, so their sum only grows
        self.to_host = False  # whether current allocations are host memory
        self._on_host: dict[int, torch.UntypedStorage] = {}  # referenced here, so that no address is reused
        self._indices: dict[int, int] = {}  # a storage's address -> index of its allocation
        self._sizes: list[int] = []  # by index
        self._labels: dict[int, str] = {}  # by index
        self._changes: list[int] = []  # index + 1: allocated, -(index + 1): freed
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak_at = 0  # index of changes before the peak

    def track(self, tensor: Tensor) -> None:
        """Track the memory of an operation's result, unless it is already tracked."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._indices or address in self._on_host:
            return
        if self.to_host:
            self.host_peak += storage.nbytes()
            self._on_host[address] = storage
            return
        self._allocated(storage, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage, label: str) -> None:
        """Track a storage whose memory was reallocated or freed."""
        self._freed(storage._cdata)
        self._allocated(storage, storage.nbytes())
        self._labels[self._indices[storage._cdata]] = label

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Label the memory of these tensors."""
        for tensor in tensors:
            index = self._indices.get(tensor.untyped_storage()._cdata)
            if index is not None:
                self._labels[index] = name

    def claim(self, name: str) -> None:
        """Label all memory that has no label yet."""
        for index in self._indices.values():
            self._labels.setdefault(index, name)

    def reset_peak(self) -> None:
        """Reset the peak to the current memory."""
        self.peak, self._peak_at = self.live, len(self._changes)

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by label at the peak."""
        return self._breakdown(self._peak_at)

    def now(self) -> dict[str, int]:
        """Return the current bytes by label."""
        return self._breakdown(len(self._changes))

    def _breakdown(self, moment: int) -> dict[str, int]:
        held: set[int] = set()
        for change in self._changes[:moment]:
            (held.add if change > 0 else held.discard)(abs(change) - 1)
        by_label: dict[str, int] = defaultdict(int)
        for index in held:
            by_label[self._labels.get(index, ACTIVATIONS)] += self._sizes[index]
        return dict(by_label)

    def _allocated(self, storage: torch.UntypedStorage, size: int) -> None:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        address, index = storage._cdata, len(self._sizes)
        self._sizes.append(size)
        self._indices[address] = index
        self._references[address] = weakref.ref(storage, partial(self._on_delete, address, index))
        self._changes.append(index + 1)
        self.live += size
        if self.live > self.peak:
            self.peak, self._peak_at = self.live, len(self._changes)

    def _on_delete(self, address: int, index: int, _reference: object) -> None:
        if self._indices.get(address) == index:
            self._freed(address)

    def _freed(self, address: int) -> None:
        index = self._indices.pop(address, None)
        if index is not None:
            del self._references[address]
            self._changes.append(-(index + 1))
            self.live -= self._sizes[index]
