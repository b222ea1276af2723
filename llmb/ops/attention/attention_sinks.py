"""Attention sinks: a learned logit of each head that joins the softmax of every query, without a value.

    lse_HN = add_sinks_(out_NHD, lse_HN, sinks_H)       # of attention without sinks, by its log-sum-exp
    dsinks_H = sink_gradient(dout_NHD, out_NHD, lse_HN, sinks_H)

A kernel that computes attention backward from the log-sum-exp needs only that of the softmax with the sink: see
`attention_block.py`. Log-sum-exps and sinks are natural. Shapes: N queries, H heads, D head_dim.
"""

import torch
from torch import Tensor


def add_sinks_(out_NHD: Tensor, lse_HN: Tensor, sinks_H: Tensor) -> Tensor:
    """Scale the output to that of the softmax with sinks, and return its log-sum-exp."""
    total_HN = torch.logaddexp(lse_HN, sinks_H[:, None].to(lse_HN.dtype))
    out_NHD.mul_((lse_HN - total_HN).exp().T[..., None].to(out_NHD.dtype))
    return total_HN


def sink_gradient(dout_NHD: Tensor, out_NHD: Tensor, lse_HN: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks; output and log-sum-exp are those with them."""
    delta_HN = (dout_NHD.to(lse_HN.dtype) * out_NHD.to(lse_HN.dtype)).sum(-1).T
    return -((sinks_H[:, None].to(lse_HN.dtype) - lse_HN).exp() * delta_HN).sum(1).to(sinks_H.dtype)
