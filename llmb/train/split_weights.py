"""Weights in two halves: the upper one is the bf16 number that products take, the lower one what it lacks of fp32.

    halve_weights(part, gradients=torch.float32, exact=True)
    weight.low          # int16: (bits of the weight << 16) + low are the bits of the fp32 number

Nothing is cast where a weight is used, both halves together take the four bytes of the fp32 number, and AdamW updates
that (`split_adam.py`). Weights that are not exact have no lower half, and AdamW rounds them at random. Only where a
rank has its weights to itself: those of several are cast as they are gathered. Matrices that are used in fp32, as of
routers, and vectors stay whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear
from llmb.ops.optim.adam import exact_weight, split_weight


class HalvedWeight(nn.Parameter):
    """The upper half of a weight: the nearest bf16 number."""

    low: Tensor | None

    @classmethod
    def of(cls, whole: Tensor, gradients: torch.dtype, exact: bool, upper: Tensor | None = None) -> "HalvedWeight":
        """Of fp32 numbers; its gradient is kept in the format given. `upper`: memory for the upper half."""
        weight = cls(torch.empty_like(whole, dtype=torch.bfloat16) if upper is None else upper)
        weight.low = torch.empty_like(whole, dtype=torch.int16) if exact else None
        weight.grad_dtype = gradients
        weight.set(whole)
        return weight

    @torch.no_grad()
    def whole(self) -> Tensor:
        """As fp32 numbers."""
        return self.detach().float() if self.low is None else exact_weight(self.detach(), self.low)

    @torch.no_grad()
    def set(self, whole: Tensor) -> None:
        """Become these, or without a lower half the nearest that there are."""
        if self.low is None:
            self.detach().copy_(whole.detach())
        else:
            split_weight(whole.detach(), self.detach(), self.low)


def halve_weights(part: Network, gradients: torch.dtype, exact: bool) -> None:
    """Every matrix that is computed with in bf16, few at a time: no more of them are there in both forms.

    A layer may have `neighbours`: lists of linear layers whose upper halves shall be one matrix.
    """
    for module in part.modules():
        for neighbours in getattr(module, "neighbours", ()):
            rows = [len(one.weight) for one in neighbours]
            memory = torch.empty(
                sum(rows), neighbours[0].in_features, dtype=torch.bfloat16, device=neighbours[0].weight.device
            )
            for one, upper in zip(neighbours, memory.split(rows), strict=True):
                one.weight = HalvedWeight.of(one.weight, gradients, exact, upper)
        if isinstance(module, nn.Linear | nn.Embedding | GroupedLinear) and not isinstance(module.weight, HalvedWeight):
            module.weight = HalvedWeight.of(module.weight, gradients, exact)


def joint(neighbours: Sequence[Tensor]) -> Tensor:
    """The one matrix that these are the rows of, one behind another."""
    first, place = neighbours[0], neighbours[0].storage_offset()
    for one in neighbours:
        assert one.untyped_storage()._cdata == first.untyped_storage()._cdata
        assert one.storage_offset() == place, "matrices that do not lie side by side"
        assert one.is_contiguous()
        place += one.numel()
    rows, width = sum(map(len, neighbours)), first.shape[1]
    return first.as_strided((rows, width), (width, 1), first.storage_offset())
