"""In which number formats a run keeps what, and the numbers inside pieces of units.

    formats = formats_of(plan)
    low, m, v = formats.state(arena.buffer("state", 0))

The sizes of pieces in `llmb/perfmodel/offload/buffers.py` follow from the same choices.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.offload_plan import Plan
from llmb.ops.optim.adam import Rounding


class State(NamedTuple):
    """What the optimizer keeps of each weight, in the order in which it lies in a piece."""

    low: Tensor | None  # the bits that a bf16 weight lacks of its fp32 self
    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class Formats:
    """Of a run."""

    stream: torch.dtype  # and of weights
    grad: torch.dtype
    moment: torch.dtype
    has_low: bool
    rounding: Rounding

    def weights(self, piece: Tensor) -> Tensor:
        """The numbers of a unit's weights, given its bytes."""
        return piece.view(self.stream)

    def grads(self, piece: Tensor) -> Tensor:
        """The same of its gradients."""
        return piece.view(self.grad)

    def state(self, piece: Tensor) -> State:
        """The same of its optimizer state."""
        low = torch.int16.itemsize if self.has_low else 0
        numbers = piece.numel() // (low + 2 * self.moment.itemsize)
        low_bytes, *moments = piece.split((low * numbers, *[self.moment.itemsize * numbers] * 2))
        m, v = (one.view(self.moment) for one in moments)
        return State(low_bytes.view(torch.int16) if self.has_low else None, m, v)


def formats_of(plan: Plan) -> Formats:
    """What a plan asks for; in fp32 nothing is rounded, whatever the update."""
    if plan.dtype == "fp32":
        return Formats(torch.float32, torch.float32, torch.float32, has_low=False, rounding="nearest")
    rounding: Rounding = "stochastic" if plan.update == "stochastic" else "nearest"
    master = plan.update == "master"
    wide = torch.float32 if master else torch.bfloat16
    return Formats(torch.bfloat16, wide, wide, has_low=master, rounding=rounding)
