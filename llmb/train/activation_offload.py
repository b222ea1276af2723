"""Activations of chosen layers wait in host memory between the forward and the backward pass.

    offload(network, first=4, layers=8)

What a layer saves for its backward pass is copied out while the next layer computes, then let go; it is copied back in
while the layer behind it goes through its backward pass. So at most two offloaded layers are on the device at once.
Copies run on a stream of their own. Streams wait for each other, the host for neither, and memory is only given back
after the stream that uses it has waited: so the order of memory's use is that of the main stream.

Host memory is pinned, which is slow to obtain: buffers are kept and used again by every micro-batch. Parameters and
what all layers share are on the device anyway and stay there, as do tensors too small to be worth a copy. So does all
of the network's last layer, whose backward pass is the next thing to run. On the CPU the same code copies from host
memory to host memory: it saves nothing, and tests everything but the streams.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from llmb.models.architectures import Network
from llmb.train.optimizer import local

SMALLEST_BYTES = 2**20  # a copy of less costs more time to start than to make
BUFFER_STEP = 2**21  # buffers come in multiples of this, so that almost equal tensors can use the same ones


class Lane:
    """The stream of copies and the host buffers. On the CPU copies are done at once: there is nothing to wait for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied inside runs beside the main stream, after all that has been started there so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """This moment among the copies."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What the main stream starts from now on comes after that moment."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def take(self, size: int) -> Tensor:
        """A host buffer of at least this many bytes. Its last use was a copy, and so is the next: they cannot meet."""
        size = -(-size // BUFFER_STEP) * BUFFER_STEP
        if self._free[size]:
            return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def give(self, buffer: Tensor) -> None:
        """A buffer that nobody reads any more."""
        self._free[buffer.numel()].append(buffer)


Keep = Callable[[], set[int]]


class Stash:
    """What one layer saved in one forward pass: on the device, on the host, or both.

    Autograd's nodes hold it through `unpack`; when the last of them has run, it goes, and its buffers are free.
    """

    def __init__(self, lane: Lane, before: "Stash | None", begin: Callable[["Stash"], None], keep: Keep | None):
        self.lane = lane
        self.before = before  # of the layer in front, whose backward pass comes next
        self._begin = begin
        self._keep = keep  # which storages stay on the device; none: all do
        self._on_device: list[Tensor | None] = []
        self._on_host: list[Tensor] = []  # in the same order
        self._buffers: list[Tensor] = []
        self._seen: dict[Any, tuple[int, Tensor]] = {}  # one copy of what several operations save
        self._copied: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Called as the layer saves a tensor: starts its copy and remembers it by a number, or keeps it."""
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if self._keep is None or size < SMALLEST_BYTES or storage.nbytes() < size or storage._cdata in self._keep():
            return tensor
        # A storage names a tensor here, because all that was seen is held until the layer is done. It does so by
        # itself, not by the address of its memory: in a rehearsal it has none.
        key = (storage._cdata, tensor.storage_offset(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._seen:
            self._seen[key] = (len(self._on_host), tensor)
            self._copy_out(tensor, size)
        return self._seen[key][0]

    def _copy_out(self, tensor: Tensor, size: int) -> None:
        strides = torch.empty_like(tensor, device="meta").stride()  # its own, unless it has gaps
        if strides != tensor.stride():
            tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        buffer = self.lane.take(size)
        host = buffer[:size].view(tensor.dtype).as_strided(tensor.shape, strides)
        with self.lane.copying():
            host.copy_(tensor, non_blocking=True)
        self._buffers.append(buffer)
        self._on_host.append(host)
        self._on_device.append(tensor)

    def close(self) -> None:
        """The layer is done: nothing more will be saved."""
        self._seen.clear()
        self._copied = self.lane.mark()

    def leave(self) -> None:
        """Let go of the device's memory, once the copies are out or, later, once the backward pass is through."""
        self.lane.wait(self._copied)
        self._on_device = [None] * len(self._on_host)

    def fetch(self) -> None:
        """Start to copy back what is not on the device."""
        missing = [index for index, tensor in enumerate(self._on_device) if tensor is None]
        if not missing:
            return
        arriving = [torch.empty_like(self._on_host[index], device=self.lane.device) for index in missing]
        with self.lane.copying():
            for index, tensor in zip(missing, arriving, strict=True):
                self._on_device[index] = tensor.copy_(self._on_host[index], non_blocking=True)
        self._copied = self.lane.mark()

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Called as the backward pass needs a tensor."""
        self._begin(self)
        if isinstance(packed, Tensor):
            return packed
        tensor = self._on_device[packed]
        assert tensor is not None
        return tensor

    def arrive(self) -> None:
        """The main stream goes on only with what has been copied back."""
        self.fetch()
        self.lane.wait(self._copied)

    def __del__(self) -> None:
        for buffer in self._buffers:
            self.lane.give(buffer)


class Offload:
    """Leads the layers' stashes through a forward pass and back."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._last: Callable[[], Stash | None] = lambda: None  # a weak reference: only autograd keeps stashes alive
        self._current: Callable[[], Stash | None] = lambda: None  # the one whose backward pass is running

    def forward(
        self, layer: nn.Module, forward: Callable, position: int, moves: bool, followed: bool, *inputs: Tensor
    ) -> Any:
        """One layer's forward pass; the layer in front has been copied out by its end, and itself if none follows."""
        if self._lane is None:
            self._lane = Lane(inputs[0].device)
        # Looked at when something is saved: a sharded layer gathers some of its parameters only as it goes on.
        shared = inputs[1:]  # not all inputs: who refers to the stream keeps it on the device
        keep = (lambda: _storages((*layer.parameters(), *shared))) if moves else None
        before = self._last() if position else None
        stash = Stash(self._lane, before, self.begin, keep)
        self._last = weakref.ref(stash)
        with saved_tensors_hooks(stash.pack, stash.unpack):
            out = forward(*inputs)
        stash.close()
        if before is not None:
            before.leave()
        if moves and not followed:
            stash.leave()
        return out

    def begin(self, stash: Stash) -> None:
        """A layer's backward pass begins: the one behind it is through, the one in front of it comes next."""
        current = self._current()
        if stash is current:
            return
        if current is not None:
            current.leave()
        self._current = weakref.ref(stash)
        stash.arrive()
        if stash.before is not None:
            stash.before.fetch()
            stash.before = None


@torch.no_grad()
def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """By their addresses; of a tensor that is spread over ranks, what this one has."""
    return {local(tensor).untyped_storage()._cdata for tensor in tensors}


def offload(network: Network, first: int, layers: int) -> None:
    """Offload so many layers from number `first` on. The layer after them moves nothing but tells when to begin."""
    lead = Offload()
    chosen = list(network.layers)[first : first + layers + 1] if layers else []
    for position, layer in enumerate(chosen):
        followed = layer is not list(network.layers)[-1]
        moves = position < layers and (followed or not network.last)
        layer.forward = partial(lead.forward, layer, layer.forward, position, moves, followed)
