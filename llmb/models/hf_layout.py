"""Tensors whose values or rows differ between our networks and Hugging Face files.

A projection with several outputs (sections) for each of several groups can be sharded over ranks by groups only if the
rows of a group are contiguous. Published files hold each section for all groups instead.

Experts may lie in files as one stack of transposed matrices, with the outputs of gate and up in turn.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class HfLayout(Protocol):
    """Conversion of one tensor."""

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the tensor of a file."""
        ...

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return our tensor."""
        ...


@dataclass(frozen=True)
class GroupedRowLayout:
    """Rows of a tensor: groups, each split into sections of these widths."""

    groups: int
    sections: tuple[int, ...]

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the rows in the order of a file."""
        by_group = tensor.unflatten(0, (self.groups, -1)).split(self.sections, dim=1)
        return torch.cat([section.flatten(0, 1) for section in by_group])

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return a file's rows in our order."""
        by_section = tensor.split([self.groups * width for width in self.sections])
        return torch.cat([section.unflatten(0, (self.groups, -1)) for section in by_section], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class OffsetLayout:
    """Weights of norms that files hold as what is added to this offset."""

    offset: float

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the weights without the offset."""
        return tensor - self.offset

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return the weights with the offset, rounded once if they are in less than fp32."""
        return (tensor.float() + self.offset).to(tensor.dtype)


@dataclass(frozen=True)
class PartialRotaryLayout:
    """Rows of query and key projections whose heads are rotated in their first channels only.

    Files pair channel i with i + rotary_dim / 2. Here i is paired with i + head_dim / 2, as in heads that are rotated
    as a whole, and the pairs behind the rotated ones have frequency 0. Both orders give the same attention.
    """

    head_dim: int
    rotary_dim: int

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the rows in the order of a file."""
        return self._reorder(tensor, torch.argsort(self._order()))

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return a file's rows in our order."""
        return self._reorder(tensor, self._order())

    def _order(self) -> Tensor:
        half, passed = self.rotary_dim // 2, (self.head_dim - self.rotary_dim) // 2
        first, second, third, fourth = torch.arange(self.head_dim).split((half, half, passed, passed))
        return torch.cat((first, third, second, fourth))

    def _reorder(self, tensor: Tensor, order_D: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.head_dim))[:, order_D.to(tensor.device)].flatten(0, 1)


@dataclass(frozen=True)
class ExpertStackLayout:
    """Output `part` of each `parts` of a stack of experts: [E, I, O * parts], or biases [E, O * parts]."""

    part: int = 0
    parts: int = 1
    transposed: bool = True  # a matrix; a bias is not

    def stack(self, *tensors: Tensor) -> Tensor:
        """Return the stack of a file from [E, O, I] or [E, O] of each part."""
        assert len(tensors) == self.parts
        interleaved = torch.stack(tensors, dim=2).flatten(1, 2)
        return interleaved.mT.contiguous() if self.transposed else interleaved

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the stack of a file from its only part."""
        return self.stack(tensor)

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return [E, O, I] or [E, O] of this part."""
        return (tensor.mT if self.transposed else tensor)[:, self.part :: self.parts]
