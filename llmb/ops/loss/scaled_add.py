"""A tensor times a number that lies on the device, added to one of another format, or written over it, in one pass.

    scaled_add_(total, part, scale, fresh=False)            # total += part * scale
    scaled_add_(total, part, scale, fresh=True)             # total = part * scale; they may be the same

torch does it at a third of the bandwidth, where formats differ from one another or from that of the number.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def scaled_add_(total: Tensor, part: Tensor, scale: Tensor, fresh: bool) -> None:
    """Computed in fp32 at least, and rounded once."""
    if takes_triton(total):
        from llmb.ops.loss.scaled_add_triton import scaled_add_triton_

        scaled_add_triton_(total, part, scale, fresh)
        torch.autograd.graph.increment_version(total)  # as torch's own do: who has kept it is told
    else:
        scaled_add_reference_(total, part, scale, fresh)


def scaled_add_reference_(total: Tensor, part: Tensor, scale: Tensor, fresh: bool) -> None:
    """The same in plain torch."""
    scaled = part.to(torch.promote_types(part.dtype, torch.float32)) * scale
    total.copy_(scaled if fresh else total + scaled)
