"""Tensors whose values or rows differ between our networks and Hugging Face files.

A projection with several outputs (sections) for each of several groups can be sharded over ranks by groups only if the
rows of a group are contiguous. Published files hold each section for all groups instead.

Experts may lie in files as one stack of transposed matrices, with the outputs of gate and up in turn.
"""

from collections.abc import Iterable
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
class RotaryLayout:
    """Rows of query and key projections, whose heads may be rotated in their first channels only.

    Files pair channel i with i + rotary_dim / 2, or, interleaved, channels 2i and 2i + 1. Here i is paired with
    i + head_dim / 2, as in heads that are rotated as a whole, and the pairs behind the rotated ones have frequency 0.
    All orders give the same attention.
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool = False

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the rows in the order of a file."""
        return self._reorder(tensor, torch.argsort(self._order()))

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return a file's rows in our order."""
        return self._reorder(tensor, self._order())

    def _order(self) -> Tensor:
        rotated, passed = torch.arange(self.head_dim).tensor_split((self.rotary_dim,))
        pairs = rotated.unflatten(0, (-1, 2)).T if self.interleaved else rotated.unflatten(0, (2, -1))
        return torch.cat((pairs, passed.unflatten(0, (2, -1))), dim=1).flatten()

    def _reorder(self, tensor: Tensor, order_D: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.head_dim))[:, order_D.to(tensor.device)].flatten(0, 1)


class OneRowLayout:
    """A vector that files hold as a matrix of one row."""

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the matrix of a file."""
        return tensor[None]

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return the vector."""
        return tensor[0]


# Tensors with a row for each channel of queries or keys.
ROTATED = ("q.weight", "k.weight", "q_bias", "k_bias", "q_norm.weight", "k_norm.weight")


def rotary_layouts(
    names: Iterable[str], head_dim: int, partial: float, interleaved: bool = False
) -> dict[str, HfLayout]:
    """Return the layouts of the tensors whose rows are channels of queries or keys, where files have another order."""
    rotary_dim = int(head_dim * partial)
    if rotary_dim == head_dim and not interleaved:
        return {}
    layout = RotaryLayout(head_dim, rotary_dim, interleaved)
    return {name: layout for name in names if name.endswith(tuple(f"attention.{tensor}" for tensor in ROTATED))}


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
