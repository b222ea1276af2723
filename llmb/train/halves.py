"""Weights in two halves: the upper one is the bf16 number that products take, the lower one what it lacks of fp32.

    halve_weights(part, gradients=torch.float32)
    weight.low          # int16: (bits of the weight << 16) + low are the bits of the fp32 number

Nothing is cast where a weight is used, both halves together take the four bytes of the fp32 number, and AdamW updates
that (`halved_adam.py`). Only where a rank has its weights to itself: those of several are cast as they are gathered.
Matrices that are used in fp32, as of routers, and vectors stay whole.
"""

import torch
from torch import Tensor, nn

from llmb.kernels.adam import exact_weight, split_weight
from llmb.kernels.fused_embedding import embedded
from llmb.models.architectures import Network
from llmb.models.experts import GroupedLinear


class HalvedWeight(nn.Parameter):
    """The upper half of a weight: the nearest bf16 number."""

    low: Tensor

    @classmethod
    def of(cls, whole: Tensor, gradients: torch.dtype) -> "HalvedWeight":
        """Of fp32 numbers; its gradient is kept in the format given."""
        weight = cls(torch.empty_like(whole, dtype=torch.bfloat16))
        weight.low = torch.empty_like(whole, dtype=torch.int16)
        weight.grad_dtype = gradients
        weight.set(whole)
        return weight

    @torch.no_grad()
    def whole(self) -> Tensor:
        """As fp32 numbers."""
        return exact_weight(self.detach(), self.low)

    @torch.no_grad()
    def set(self, whole: Tensor) -> None:
        """Become these."""
        split_weight(whole.detach(), self.detach(), self.low)


class FusedEmbedding(nn.Embedding):
    """An embedding whose gradient is added to where it is."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return embedded(tokens_BT, self.weight)


def halve_weights(part: Network, gradients: torch.dtype) -> None:
    """Every matrix that is computed with in bf16, one after the other: no two are there in both forms."""
    for module in part.modules():
        if isinstance(module, nn.Linear | nn.Embedding | GroupedLinear):
            module.weight = HalvedWeight.of(module.weight, gradients)
        if type(module) is nn.Embedding:
            module.__class__ = FusedEmbedding
