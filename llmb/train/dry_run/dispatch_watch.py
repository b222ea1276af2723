"""Every operation of a rehearsed rank, as it is dispatched: its memory, its FLOPs, its collectives.

FLOPs are those of matrix products, by their shapes; what fused kernels compute is told from outside (`add_flops`).
A collective's bytes are those of its larger side on this rank: what an all-gather gives, what a reduce-scatter takes.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from llmb.ops.gemm import matmul
from llmb.ops.gemm.fp8_linear import MULTIPLE
from llmb.train.dry_run.memory_tracker import Footprint

aten = torch.ops.aten
PLAIN = (Tensor, torch.nn.Parameter)
CPU, META = torch.device("cpu"), torch.device("meta")
Collective = tuple[str, str]  # what it does, the name of its group


def _product(left: Tensor, right: Tensor) -> int:
    """FLOPs of [..., M, K] x [..., K, N]; of a grouped product likewise, as K or M is the sum over groups."""
    return 2 * left.numel() * right.shape[-1]


def _scaled_grouped(left: Tensor, right: Tensor, _left_scales: Tensor, _right_scales: Tensor, ends: Tensor) -> int:
    """Likewise; where groups are summed over, `fp8_group_forms.places_of` has made room for zeros in each."""
    zeros = len(ends) * MULTIPLE if right.dim() == 2 else 0
    return 2 * len(left) * (left.shape[1] - zeros) * right.shape[-1]


FLOPS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten.mm: lambda args: _product(args[0], args[1]),
    aten.bmm: lambda args: _product(args[0], args[1]),
    aten.addmm: lambda args: _product(args[1], args[2]),
    aten.addmm_: lambda args: _product(args[1], args[2]),
    matmul.OPERATION: lambda args: _product(args[0], args[1]),
    aten._grouped_mm: lambda args: _product(args[0], args[1]),
    aten._scaled_grouped_mm: lambda args: _scaled_grouped(*args[:5]),
}
# What a CUDA kernel takes besides its result.
WORKSPACES: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten.logsumexp: lambda args: size(args[0]),  # the exponentials
}
KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_out": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}


def size(tensor: Tensor) -> int:
    """Bytes of the values that a tensor shows."""
    return tensor.numel() * tensor.element_size()


class Watch(TorchDispatchMode):
    """Follows what is dispatched inside it, on plain tensors: those spread over ranks come apart first."""

    def __init__(self, footprint: Footprint):
        super().__init__()
        self.footprint = footprint
        self.flops = 0.0
        self.calls: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()

    def add_flops(self, flops: float) -> None:
        """Work that no dispatched operation shows."""
        self.flops += flops

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if packet is torch.ops._c10d_functional.wait_tensor:
            return args[0]  # torch's form without values would give a copy
        if kwargs.get("device") == CPU:
            kwargs = {**kwargs, "device": META}
        if function.namespace == "c10d":  # works in place: what it gives is only to be waited for
            result = function(*tree_map_only(Tensor, _stand_in, args), **kwargs)
            self._note_collective(function, args, kwargs, ())
            return result
        result = function(*args, **kwargs)
        if packet in WORKSPACES:
            self.footprint.workspace(WORKSPACES[packet](args))
        for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(tensor, Tensor):
                self.footprint.see(tensor)
        if packet in FLOPS:
            self.flops += FLOPS[packet](args)
        elif function.namespace == "_c10d_functional":
            self._note_collective(function, args, kwargs, result)
        return result

    def _note_collective(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        kind = KINDS.get(function._schema.name.partition("::")[2])
        if kind is None:
            return
        given = sum(size(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))
        if function.namespace == "c10d":  # both sides are arguments
            sides = [sum(size(x) for x in tree_iter(arg) if isinstance(x, Tensor)) for arg in args[:2]]
            moved = max(sides)
        else:
            moved = max(given, sum(size(x) for x in tree_iter(result) if isinstance(x, Tensor)))
        what = kind, _group_name(function, args, kwargs)
        self.calls[what] += 1
        self.bytes[what] += moved


def _stand_in(_tensor: Tensor) -> Tensor:
    """A process group without processes takes any tensors, of sizes that agree, on a device that it knows."""
    return torch.empty(0, device=CPU)


def _group_name(function: Any, args: Any, kwargs: Any) -> str:
    """The process group of a collective, which is an object for one family of operations and a name for the other."""
    for argument, value in zip(function._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            return str(value)
        if argument.name == "process_group":
            return str(dist.ProcessGroup.unbox(value).group_name)
    return str(kwargs.get("group_name", "?"))
