"""Layouts of tensors that differ between our networks and Hugging Face files.

A projection with several outputs (sections) for each of several groups can be sharded over ranks by groups only if the
rows of a group are contiguous. Published files hold each section for all groups instead.

Experts may lie in files as one stack of transposed matrices, with the outputs of gate and up in turn.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorLayout(Protocol):
    """Order of the values of one of our tensors, or of several that a file holds as one."""

    def to_hf(self, *tensors: Tensor) -> Tensor:
        """Return the tensor of a file from all of ours that it holds."""

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return the one of our tensors that has this layout."""


@dataclass(frozen=True)
class GroupedRowLayout:
    """Rows of a tensor: groups, each split into sections of these widths."""

    groups: int
    sections: tuple[int, ...]

    def to_hf(self, *tensors: Tensor) -> Tensor:
        """Return the rows in the order of a file."""
        (tensor,) = tensors
        by_group = tensor.unflatten(0, (self.groups, -1)).split(self.sections, dim=1)
        return torch.cat([section.flatten(0, 1) for section in by_group])

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return a file's rows in our order."""
        by_section = tensor.split([self.groups * width for width in self.sections])
        return torch.cat([section.unflatten(0, (self.groups, -1)) for section in by_section], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class ExpertStackLayout:
    """Output `part` of each `parts` of a stack of experts: [E, I, O * parts], or biases [E, O * parts]."""

    part: int = 0
    parts: int = 1
    transposed: bool = True  # a matrix; a bias is not

    def to_hf(self, *tensors: Tensor) -> Tensor:
        """Return the stack of a file from [E, O, I] or [E, O] of each part."""
        assert len(tensors) == self.parts
        interleaved = torch.stack(tensors, dim=2).flatten(1, 2)
        return interleaved.mT.contiguous() if self.transposed else interleaved

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return [E, O, I] or [E, O] of this part."""
        return (tensor.mT if self.transposed else tensor)[:, self.part :: self.parts]
