"""Causal depthwise conv1d of a Mamba mixer: each channel a weighted sum of its last few tokens, then SiLU.

It also changes the layout of the channels. The input is grouped, as the projection before produces it and as it is
sharded over ranks: all sections of group 0, then of group 1. The output is sectioned, as the SSD scan takes it: x of
all groups, then B of all groups, then C.

Tensor names end in their shape: B sequences, T tokens, G groups, C channels (of a group after G, of all otherwise),
K kernel size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op


@op
def causal_conv1d(x_BTGC: Tensor, weight_C1K: Tensor, bias_C: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Return silu(bias + sum over k of weight[k] * x[t - K + 1 + k]), [B, T, C] in the dtype of x, x zero-padded.

    `sections` are the widths that each group's channels split into; all but the first are equal. Weights have the
    channel layout of x. The reference computes in the dtype of the weights, which is the wider one.
    """
    channels, _, kernel_size = weight_C1K.shape
    x_BCT = F.pad(x_BTGC.flatten(2).transpose(1, 2).to(weight_C1K.dtype), (kernel_size - 1, 0))
    y_BTC = F.silu(F.conv1d(x_BCT, weight_C1K, bias_C, groups=channels)).transpose(1, 2).to(x_BTGC.dtype)
    by_section = y_BTC.unflatten(2, x_BTGC.shape[2:]).split(sections, dim=-1)
    return torch.cat([section_BTGC.flatten(2) for section_BTGC in by_section], dim=-1)
