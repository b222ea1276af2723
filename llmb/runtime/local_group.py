"""Process group of one rank without peers: what a collective would deliver is copied inside the device's memory.

    dist.init_process_group(LOCAL, rank=12, world_size=32, store=dist.HashStore())      # one process, rank 12 of 32
    group.calls["all-gather"], group.bytes["all-gather"]          # of a LocalGroup, so far

An all-gather repeats this rank's shard, a reduce-scatter sums the slices that it would send to its peers, and a receive
copies values of a normal distribution, drawn once per shape. So every tensor has the size, and GEMMs operands of about
the magnitude, that they have among real ranks, and as many bytes are read and written; sums over ranks are not correct,
and neither are losses. The copies run on the current stream, and can be captured in a CUDA graph.

Bytes are those of the larger side on this rank, as in `llmb/perfmodel/communication.py`.
"""

# torch's stubs differ between versions in the names and overloads of these methods:
# mypy: disable-error-code="override,assignment"

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

LOCAL = "llmb_local"  # name of the backend


class LocalGroup(ProcessGroup):
    """Group of `size` ranks of which only this one exists.

    torch renamed several methods after 2.11; each is defined under both names.
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.calls: Counter[str] = Counter()  # by kind of collective
        self.bytes: Counter[str] = Counter()
        self._received: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}

    # torch keeps the names of a group in its backends, of which this one has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name under which functional collectives find the group."""
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        """Mesh dimension that the group belongs to."""
        return self._description

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return LOCAL

    # Collectives

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, x: Tensor, _options: Any = None) -> Work:
        """Repeat this rank's shard, except where it is already a part of the output."""
        rows, shard, rank = output.view(self.size(), -1), x.view(1, -1), self.rank()
        is_in_place = rows[rank].data_ptr() == x.data_ptr()
        for part in (rows[:rank], rows[rank + 1 :]) if is_in_place else (rows,):
            part.copy_(shard)
        return self._done("all-gather", output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], _options: Any = None) -> Work:
        """Gather several tensors."""
        works = [self.all_gather_single(output, x) for output, x in zip(outputs, inputs, strict=True)]
        return works[-1]

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, x: Tensor, _options: Any = None) -> Work:
        """Sum the slices of what this rank contributes, in place of what its peers contribute to its slice."""
        torch.sum(x.view(self.size(), *output.shape), dim=0, out=output)
        return self._done("reduce-scatter", x)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], _options: Any = None
    ) -> Work:
        """Reduce several tensors."""
        works = [self.reduce_scatter_single(output, x) for output, x in zip(outputs, inputs, strict=True)]
        return works[-1]

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], _options: Any = None) -> Work:
        """Read and write the tensor."""
        (x,) = tensors
        x.copy_(x.clone())
        return self._done("all-reduce", x)

    @torch.no_grad()
    def all_to_all_single(
        self, output: Tensor, x: Tensor, _output_sizes: list[int], _input_sizes: list[int], _options: Any = None
    ) -> Work:
        """Return the rows that this rank sends; ranks exchange equal numbers of them."""
        output.copy_(x)
        return self._done("all-to-all", x)

    def send(self, tensors: list[Tensor], _rank: int, _tag: int) -> Work:
        """Do nothing: the copy of a receive reads and writes as much as a send and a receive together."""
        (x,) = tensors
        return self._done("send", x)

    @torch.no_grad()
    def recv(self, tensors: list[Tensor], _rank: int, _tag: int) -> Work:
        """Copy random values; integers are ones, by which pipeline stages agree that they know their shapes."""
        (x,) = tensors
        key = x.shape, x.dtype, x.device
        if key not in self._received:
            draw = torch.randn if x.is_floating_point() else torch.ones
            self._received[key] = draw(x.shape, device=x.device, dtype=x.dtype)
        x.copy_(self._received[key])
        return self._done("receive", x)

    def broadcast(self, _tensors: list[Tensor], _options: Any = None) -> Work:
        """Keep what this rank has."""
        return _Done()

    def barrier(self, _options: Any = None) -> Work:
        """Return at once."""
        return _Done()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _done(self, kind: str, larger: Tensor) -> Work:
        self.calls[kind] += 1
        self.bytes[kind] += larger.nbytes
        return _Done()


class _Done(Work):
    """A collective whose copies are launched: whatever follows on the stream comes after them."""

    def wait(self, timeout: Any = None) -> bool:
        return True


dist.Backend.register_backend(
    LOCAL, lambda _store, rank, size, _timeout: LocalGroup(rank, size), devices=["cpu", "cuda"]
)
