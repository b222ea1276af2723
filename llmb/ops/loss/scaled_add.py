"""A tensor times a scalar on the device, added to a tensor of another dtype, or written over it, in one pass.

    scaled_add_(total, x, scale, accumulate=True)            # total += x * scale
    scaled_add_(total, x, scale, accumulate=False)           # total = x * scale; they may be the same tensor
    scaled_add_(total, x, None, accumulate=True)             # total += x

torch does it at a third of the bandwidth if the dtypes of the tensors or of the scalar differ.
"""

from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def scaled_add_(total: Tensor, x: Tensor, scale: Tensor | None, accumulate: bool) -> None:
    """Add x * scale to total, or write it there; computed in fp32 at least, and rounded once."""
    scaled = at_least_fp32(x) if scale is None else at_least_fp32(x) * scale
    total.copy_(total + scaled if accumulate else scaled)
