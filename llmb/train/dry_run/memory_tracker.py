"""Which memory a rehearsed rank holds at each moment, by what it is for.

Every storage is followed from the operation that makes it until nothing refers to it. What comes and goes is written
down as it happens; whose it was can be said at any later time, so the peak is taken apart only after the run. Sizes
are rounded up as CUDA's allocator does. Memory of the host is counted apart.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

GRAIN = 512  # bytes: CUDA's allocator gives memory in multiples of this
REST = "activations"  # what nobody has claimed


class Footprint:
    """All storages seen so far, and how many bytes they were at each moment."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.host_peak = 0  # buffers are kept for the next time, so their sum only grows
        self.to_host = False  # whether what is allocated now lies in the memory of the host
        self._on_host: dict[int, torch.UntypedStorage] = {}  # held here, so that no other can have the same address
        self._numbers: dict[int, int] = {}  # a storage's address -> the number of its allocation
        self._sizes: list[int] = []  # by number
        self._labels: dict[int, str] = {}  # by number
        self._changes: list[int] = []  # number + 1: allocated, -(number + 1): freed
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak_at = 0  # how many changes had happened then

    def see(self, tensor: Tensor) -> None:
        """An operation gave this tensor: its memory is new, or known already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return
        if address in self._on_host:
            return
        if self.to_host:
            self.host_peak += storage.nbytes()
            self._on_host[address] = storage
            return
        self._allocated(storage, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage, label: str) -> None:
        """A storage has been given other memory, or none."""
        self._freed(storage._cdata)
        self._allocated(storage, storage.nbytes())
        self._labels[self._numbers[storage._cdata]] = label

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors' memory is for."""
        for tensor in tensors:
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self._labels[number] = name

    def claim(self, name: str) -> None:
        """Say what all memory is for that nobody has claimed yet."""
        for number in self._numbers.values():
            self._labels.setdefault(number, name)

    def begin(self) -> None:
        """Forget the peak so far: from here on it is looked for anew."""
        self.peak, self._peak_at = self.live, len(self._changes)

    def at_peak(self) -> dict[str, int]:
        """Bytes by label when there were most."""
        return self._taken_apart(self._peak_at)

    def now(self) -> dict[str, int]:
        """Bytes by label at this moment."""
        return self._taken_apart(len(self._changes))

    def _taken_apart(self, moment: int) -> dict[str, int]:
        held: set[int] = set()
        for change in self._changes[:moment]:
            (held.add if change > 0 else held.discard)(abs(change) - 1)
        parts: dict[str, int] = defaultdict(int)
        for number in held:
            parts[self._labels.get(number, REST)] += self._sizes[number]
        return dict(parts)

    def _allocated(self, storage: torch.UntypedStorage, size: int) -> None:
        size = -(-size // GRAIN) * GRAIN
        address, number = storage._cdata, len(self._sizes)
        self._sizes.append(size)
        self._numbers[address] = number
        self._references[address] = weakref.ref(storage, partial(self._gone, address, number))
        self._changes.append(number + 1)
        self.live += size
        if self.live > self.peak:
            self.peak, self._peak_at = self.live, len(self._changes)

    def workspace(self, size: int) -> None:
        """An operation took this much on top while it ran."""
        if self.live + size > self.peak:
            self._changes += [len(self._sizes) + 1, -(len(self._sizes) + 1)]
            self._sizes.append(size)
            self.peak, self._peak_at = self.live + size, len(self._changes) - 1

    def _gone(self, address: int, number: int, _reference: object) -> None:
        if self._numbers.get(address) == number:
            self._freed(address)

    def _freed(self, address: int) -> None:
        number = self._numbers.pop(address, None)
        if number is not None:
            del self._references[address]
            self._changes.append(-(number + 1))
            self.live -= self._sizes[number]
