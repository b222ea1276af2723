"""The place of the largest number in each row of a few long ones; the first of equals, as torch has it.

Torch gives each row to one program, which leaves most of a GPU idle while it goes through a vocabulary.
"""

from torch import Tensor

from llmb.ops.dispatch import takes_triton


def argmax(x_SV: Tensor) -> Tensor:
    """[S], int64; by two kernels where there are some. A NaN counts as the largest of all."""
    if takes_triton(x_SV):
        from llmb.ops.sampling.argmax_triton import argmax_triton

        return argmax_triton(x_SV)
    return x_SV.argmax(dim=-1)
