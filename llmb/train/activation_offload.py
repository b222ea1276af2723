"""Activation offload: saved activations of some layers are in host memory between forward and backward.

    offload_activations(network, first=4, layers=8)

Activations saved by a layer are copied to the host (D2H) while the next layer computes, then freed; they are prefetched
(H2D) during the backward pass of the next layer. So at most two offloaded layers are on the device at once. Copies run
on a separate CUDA stream. Streams wait for each other, the host for neither, and memory is freed only after the main
stream has waited for the copy, so it is reused in the order of the main stream.

Host memory is pinned, which is slow to allocate: buffers are reused by every micro-batch. Parameters and tensors shared
by all layers are on the device anyway and stay there, as do small tensors and the network's last layer, whose backward
pass runs next. On the CPU the same code copies from host to host: no saving, but everything except streams is tested.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from llmb.models.architectures import Network
from llmb.train.module_class import wrap_forward
from llmb.train.side_stream import SideStream

MIN_BYTES = 2**20  # a smaller copy takes longer to launch than to run
BUFFER_ALIGNMENT = 2**21  # buffer sizes are multiples of this, so that similar tensors can share buffers


class CopyStream(SideStream):
    """CUDA stream for copies, and the pool of host buffers."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._free_buffers: dict[int, list[Tensor]] = defaultdict(list)

    def allocate(self, size: int) -> Tensor:
        """Return a host buffer of at least this many bytes; its uses are all copies on this stream, hence ordered."""
        size = -(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        if self._free_buffers[size]:
            return self._free_buffers[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def free(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free_buffers[buffer.numel()].append(buffer)


ResidentStorages = Callable[[], set[int]]


class OffloadedActivations:
    """Activations saved by one layer in one forward pass: on the device, on the host, or both.

    Autograd nodes reference it through `unpack`; after the last of them has run its buffers are freed.
    """

    def __init__(
        self,
        copies: CopyStream,
        previous: "OffloadedActivations | None",
        begin_backward: Callable[["OffloadedActivations"], None],
        resident: ResidentStorages | None,
    ):
        self.copies = copies
        self.previous = previous  # of the previous layer, whose backward pass comes next
        self._begin_backward = begin_backward
        self._resident = resident  # which storages stay on the device; none: all do
        self._on_device: list[Tensor | None] = []
        self._on_host: list[Tensor] = []  # in the same order
        self._buffers: list[Tensor] = []
        self._seen: dict[Any, tuple[int, Tensor]] = {}  # tensors saved by several operations are copied once
        self._copied: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Saved-tensor hook: start the copy and return its index, or return the tensor if it stays."""
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if self._resident is None or size < MIN_BYTES or storage.nbytes() < size or storage._cdata in self._resident():
            return tensor
        # A storage identifies a tensor, as all seen tensors are held until the layer is done. The address of the
        # storage object is used, not that of its memory: on the meta device it has none.
        key = (storage._cdata, tensor.storage_offset(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._seen:
            self._seen[key] = (len(self._on_host), tensor)
            self._copy_out(tensor, size)
        return self._seen[key][0]

    def _copy_out(self, tensor: Tensor, size: int) -> None:
        strides = torch.empty_like(tensor, device="meta").stride()  # the same strides unless it has gaps
        if strides != tensor.stride():
            tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        buffer = self.copies.allocate(size)
        host = buffer[:size].view(tensor.dtype).as_strided(tensor.shape, strides)
        with self.copies.running():
            host.copy_(tensor, non_blocking=True)
        self._buffers.append(buffer)
        self._on_host.append(host)
        self._on_device.append(tensor)

    def end_forward(self) -> None:
        """Finish the forward pass of the layer."""
        self._seen.clear()
        self._copied = self.copies.record_event()

    def free_device(self) -> None:
        """Free device memory after the copies to the host or, later, after the backward pass."""
        self.copies.wait(self._copied)
        self._on_device = [None] * len(self._on_host)

    def prefetch(self) -> None:
        """Start H2D copies of what is not on the device."""
        missing = [index for index, tensor in enumerate(self._on_device) if tensor is None]
        if not missing:
            return
        on_device = [torch.empty_like(self._on_host[index], device=self.copies.device) for index in missing]
        with self.copies.running():
            for index, tensor in zip(missing, on_device, strict=True):
                self._on_device[index] = tensor.copy_(self._on_host[index], non_blocking=True)
        self._copied = self.copies.record_event()

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Saved-tensor hook of the backward pass."""
        self._begin_backward(self)
        if isinstance(packed, Tensor):
            return packed
        tensor = self._on_device[packed]
        assert tensor is not None
        return tensor

    def wait_on_device(self) -> None:
        """Make the main stream wait for the H2D copies."""
        self.prefetch()
        self.copies.wait(self._copied)

    def __del__(self) -> None:
        for buffer in self._buffers:
            self.copies.free(buffer)


class ActivationOffloader:
    """Scheduler of the copies of all offloaded layers over forward and backward."""

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        # Weak references: only autograd keeps activations alive.
        self._last: Callable[[], OffloadedActivations | None] = lambda: None
        self._current: Callable[[], OffloadedActivations | None] = lambda: None  # whose backward pass is running

    def forward(
        self, position: int, is_offloaded: bool, has_next: bool, forward: Callable, layer: nn.Module, *inputs: Tensor
    ) -> Any:
        """Run a layer's forward pass; frees the previous layer at its end, and this one if it is the last."""
        if self._copies is None:
            self._copies = CopyStream(inputs[0].device)
        # Evaluated when a tensor is saved: a sharded layer gathers some parameters during its forward pass.
        shared = inputs[1:]  # without inputs[0]: a reference to the residual would keep it on the device
        resident = (lambda: _storages((*layer.parameters(), *shared))) if is_offloaded else None
        previous = self._last() if position else None
        saved = OffloadedActivations(self._copies, previous, self.begin_backward, resident)
        self._last = weakref.ref(saved)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            out = forward(layer, *inputs)
        saved.end_forward()
        if previous is not None:
            previous.free_device()
        if is_offloaded and not has_next:
            saved.free_device()
        return out

    def begin_backward(self, saved: OffloadedActivations) -> None:
        """Free the layer whose backward pass is done, wait for this one and prefetch the previous one."""
        current = self._current()
        if saved is current:
            return
        if current is not None:
            current.free_device()
        self._current = weakref.ref(saved)
        saved.wait_on_device()
        if saved.previous is not None:
            saved.previous.prefetch()
            saved.previous = None


@torch.no_grad()
def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the storages of tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def offload_activations(network: Network, first: int, layers: int) -> None:
    """Offload `layers` layers from index `first` on. The layer after them only triggers the first prefetch."""
    offloader = ActivationOffloader()
    wrapped = list(network.layers)[first : first + layers + 1] if layers else []
    for position, layer in enumerate(wrapped):
        has_next = layer is not list(network.layers)[-1]
        is_offloaded = position < layers and (has_next or not network.last)
        wrap_forward(layer, partial(offloader.forward, position, is_offloaded, has_next))
