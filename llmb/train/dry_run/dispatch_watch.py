"""Dispatch mode of a dry run: counts memory, FLOPs and collectives of every operation.

FLOPs are those of matmuls, by their shapes; FLOPs of fused kernels are reported by the caller (`add_flops`). The bytes
of a collective are those of its larger side on this rank: the output of an all-gather, the input of a reduce-scatter.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from llmb.ops.gemm import matmul, scaled_matmul
from llmb.ops.quant.fp8_quant import FP8_ALIGNMENT
from llmb.train.dry_run.memory_tracker import MemoryTracker

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
CollectiveKey = tuple[str, str]  # kind, process group name


def _matmul_flops(left: Tensor, right: Tensor) -> int:
    """Return the FLOPs of [..., M, K] x [..., K, N]; also of a grouped GEMM, where K or M is the sum over groups."""
    return 2 * left.numel() * right.shape[-1]


def _scaled_grouped_flops(
    left: Tensor, right: Tensor, _left_scales: Tensor, _right_scales: Tensor, ends: Tensor
) -> int:
    """Return the FLOPs of an fp8 grouped GEMM; where groups are reduced over, each was padded with zeros."""
    padding = len(ends) * FP8_ALIGNMENT if right.dim() == 2 else 0
    return 2 * len(left) * (left.shape[1] - padding) * right.shape[-1]


FLOPS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten.mm: lambda args: _matmul_flops(args[0], args[1]),
    aten.bmm: lambda args: _matmul_flops(args[0], args[1]),
    aten.addmm: lambda args: _matmul_flops(args[1], args[2]),
    aten.addmm_: lambda args: _matmul_flops(args[1], args[2]),
    matmul.OPERATION: lambda args: _matmul_flops(args[0], args[1]),
    scaled_matmul.OPERATION: lambda args: _matmul_flops(args[0], args[1].T),
}
GROUPED_FLOPS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten._grouped_mm: lambda args: _matmul_flops(args[0], args[1]),
    aten._scaled_grouped_mm: lambda args: _scaled_grouped_flops(*args[:5]),
}
KINDS = {  # pattern of the operation's name: kind
    "all_?gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_?reduce": "all-reduce",
    "all_?to_?all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


def size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class DispatchWatch(TorchDispatchMode):
    """Counts operations dispatched inside it."""

    def __init__(self, memory: MemoryTracker, grouped_fraction: float = 1.0):
        super().__init__()
        self.memory = memory
        self._grouped_fraction = grouped_fraction  # of the rows of a grouped GEMM: those that are not padding
        self.flops = 0.0
        self.calls: Counter[CollectiveKey] = Counter()
        self.bytes: Counter[CollectiveKey] = Counter()

    def add_flops(self, flops: float) -> None:
        """Add FLOPs that no dispatched operation shows."""
        self.flops += flops

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if kwargs.get("device") == CPU:
            kwargs = {**kwargs, "device": META}
        if function.namespace == "c10d":  # in place: the result is only a handle
            result = function(*tree_map_only(Tensor, _cpu_placeholder, args), **kwargs)
            self._count_collective(function, args)
            return result
        result = function(*args, **kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(tensor, Tensor):
                self.memory.track(tensor)
        if packet in FLOPS:
            self.flops += FLOPS[packet](args)
        elif packet in GROUPED_FLOPS:
            self.flops += self._grouped_fraction * GROUPED_FLOPS[packet](args)
        return result

    def _count_collective(self, function: Any, args: Any) -> None:
        name = function._schema.name.partition("::")[2]
        kind = next((kind for pattern, kind in KINDS.items() if re.match(f"_?{pattern}", name)), None)
        if kind is None:
            return
        moved = max(sum(size(x) for x in tree_iter(side) if isinstance(x, Tensor)) for side in args[:2])
        key = kind, _group_name(function, args)
        self.calls[key] += 1
        self.bytes[key] += moved


def _cpu_placeholder(_tensor: Tensor) -> Tensor:
    """Return a CPU tensor for the fake process group, which does not accept the meta device."""
    return torch.empty(0, device=CPU)


def _group_name(function: Any, args: Any) -> str:
    """Return the process group name of a collective."""
    names = [argument.name for argument in function._schema.arguments]
    return str(dist.ProcessGroup.unbox(args[names.index("process_group")]).group_name)
