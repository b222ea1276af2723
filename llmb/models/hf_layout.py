"""Row layouts of projections: grouped in our networks, in sections in Hugging Face files.

A projection with several outputs (sections) for each of several groups can be sharded over ranks by groups only if the
rows of a group are contiguous. Published files hold each section for all groups instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
