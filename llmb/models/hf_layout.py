"""Rows that lie group after group in a network and section after section in its files.

A projection that makes several things for each of several groups can be split over ranks by groups only where all that
belongs to a group lies together. Published files hold each thing for all groups instead, one thing after the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """The rows of a tensor: so many groups, each cut into sections so wide."""

    groups: int
    sections: tuple[int, ...]

    def for_file(self, tensor: Tensor) -> Tensor:
        """Our rows in the order of a file."""
        by_group = tensor.unflatten(0, (self.groups, -1)).split(self.sections, dim=1)
        return torch.cat([section.flatten(0, 1) for section in by_group])

    def from_file(self, tensor: Tensor) -> Tensor:
        """A file's rows in our order."""
        by_section = tensor.split([self.groups * width for width in self.sections])
        return torch.cat([section.unflatten(0, (self.groups, -1)) for section in by_section], dim=1).flatten(0, 1)
