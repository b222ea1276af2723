"""Merge of the attention over two sets of keys by their log-sum-exps.

    merge_attn_states(out_NHD, lse_HN, other_NHD, other_lse_HN)         # in place

A softmax over both sets gives the first the weight exp(lse) / (exp(lse) + exp(other_lse)). Shapes: N queries, H heads,
D head_dim; heads of a row are contiguous, rows and log-sum-exps may be strided.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op


@op
def merge_attn_states(out_NHD: Tensor, lse_HN: Tensor, other_NHD: Tensor, other_lse_HN: Tensor) -> None:
    """Update `out` and `lse` to those over both sets of keys; computed in fp32 and rounded once."""
    merged_lse_HN = torch.logaddexp(lse_HN, other_lse_HN)
    weight, other_weight = ((lse - merged_lse_HN).exp().T[:, :, None] for lse in (lse_HN, other_lse_HN))
    out_NHD.copy_(out_NHD * weight + other_NHD * other_weight)
    lse_HN.copy_(merged_lse_HN)
