"""Attention over two sets of keys made one: outputs weighed by what each set's softmax had summed.

    merge_(out_NHD, lse_HN, other_NHD, other_lse_HN)

A softmax over both sets gives the first a share exp(lse) / (exp(lse) + exp(other_lse)) of each row. Shapes: N queries,
H heads, D width of a head; heads of a row lie side by side, rows and log-sum-exps may lie apart.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def merge_(out_NHD: Tensor, lse_HN: Tensor, other_NHD: Tensor, other_lse_HN: Tensor) -> None:
    """`out` and `lse` become those over both sets of keys; computed in fp32 and rounded once."""
    if takes_triton(out_NHD):
        from llmb.ops.attention.merge_lse_triton import merge_triton_

        merge_triton_(out_NHD, lse_HN, other_NHD, other_lse_HN)
    else:
        merge_reference_(out_NHD, lse_HN, other_NHD, other_lse_HN)


def merge_reference_(out_NHD: Tensor, lse_HN: Tensor, other_NHD: Tensor, other_lse_HN: Tensor) -> None:
    """The same in plain torch."""
    both_HN = torch.logaddexp(lse_HN, other_lse_HN)
    share, other_share = ((part - both_HN).exp().T[:, :, None] for part in (lse_HN, other_lse_HN))
    out_NHD.copy_(out_NHD * share + other_NHD * other_share)
    lse_HN.copy_(both_HN)
