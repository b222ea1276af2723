"""Split master weights: the bf16 high half that matmuls read, and the 16 low bits that complete the fp32 value.

    split_master_weights(model_part, gradients=torch.float32, exact=True)
    weight.low          # int16: (bits of the weight << 16) + low are the bits of the fp32 number

No cast is needed where a weight is used, both halves together take the four bytes of fp32, and AdamW updates the fp32
value (`split_adam.py`). Without `exact` there are no low bits, and AdamW uses stochastic rounding. Only on a single
rank: FSDP casts as it gathers. Matrices used in fp32, such as routers, and vectors stay fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear
from llmb.ops.optim.adam import join_master_weight, split_master_weight


class SplitWeight(nn.Parameter):
    """High half of a split master weight: the nearest bf16 number, with the low bits in `low`."""

    low: Tensor | None

    @classmethod
    def from_fp32(
        cls, weight_fp32: Tensor, gradients: torch.dtype, exact: bool, high: Tensor | None = None
    ) -> "SplitWeight":
        """Split an fp32 weight; `gradients` is the dtype of its gradient, `high` optional memory for the high half."""
        weight = cls(torch.empty_like(weight_fp32, dtype=torch.bfloat16) if high is None else high)
        weight.low = torch.empty_like(weight_fp32, dtype=torch.int16) if exact else None
        weight.grad_dtype = gradients
        weight.set_fp32(weight_fp32)
        return weight

    @torch.no_grad()
    def fp32(self) -> Tensor:
        """Return the weight as fp32."""
        return self.detach().float() if self.low is None else join_master_weight(self.detach(), self.low)

    @torch.no_grad()
    def set_fp32(self, weight_fp32: Tensor) -> None:
        """Copy from fp32, rounded to bf16 if there are no low bits."""
        if self.low is None:
            self.detach().copy_(weight_fp32.detach())
        else:
            split_master_weight(weight_fp32.detach(), self.detach(), self.low)


def split_master_weights(model_part: Network, gradients: torch.dtype, exact: bool) -> None:
    """Split every matrix that is used in bf16, a few at a time: only those exist in both formats at once.

    A layer may have `merged_linears`: groups of linear layers whose high halves become one contiguous matrix.
    """
    for module in model_part.modules():
        for linears in getattr(module, "merged_linears", ()):
            rows = [len(linear.weight) for linear in linears]
            merged = torch.empty(
                sum(rows), linears[0].in_features, dtype=torch.bfloat16, device=linears[0].weight.device
            )
            for linear, high in zip(linears, merged.split(rows), strict=True):
                linear.weight = SplitWeight.from_fp32(linear.weight, gradients, exact, high)
        if isinstance(module, nn.Linear | nn.Embedding | GroupedLinear) and not isinstance(module.weight, SplitWeight):
            module.weight = SplitWeight.from_fp32(module.weight, gradients, exact)


def merged_view(matrices: Sequence[Tensor]) -> Tensor:
    """Return one matrix over row blocks that are contiguous in memory."""
    first, offset = matrices[0], matrices[0].storage_offset()
    for matrix in matrices:
        assert matrix.untyped_storage()._cdata == first.untyped_storage()._cdata
        assert matrix.storage_offset() == offset, "matrices that are not contiguous in memory"
        assert matrix.is_contiguous()
        offset += matrix.numel()
    rows, width = sum(map(len, matrices)), first.shape[1]
    return first.as_strided((rows, width), (width, 1), first.storage_offset())
