"""The short convolution before a Mamba scan: each channel a weighted sum of its last few tokens, then silu.

On the way channels are put in another order. They come group after group of heads, as the projection before makes them
and as they are split over ranks, and go section after section: the values of all groups, then what all groups write
into their states, then what they read, as the scan takes them.

`causal_conv` takes the Triton kernels (`causal_conv1d_triton.py`) on a GPU and torch's convolution elsewhere.
Tensor names end in their shape: B sequences, T tokens, G groups, C channels, of a group after G and of all otherwise,
K tokens that the sum reaches over.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def causal_conv(x_BTGC: Tensor, weight_C1K: Tensor, bias_C: Tensor, sections: tuple[int, ...]) -> Tensor:
    """silu(bias + sum over k of weight[k] * x[t - K + 1 + k]), [B, T, C] in the format of x; before token 0 x is 0.

    Each group's channels are cut into sections so wide, of which all but the first are equally wide. Weights lie as x.
    """
    if takes_triton(x_BTGC):
        from llmb.ops.mamba.causal_conv1d_triton import causal_conv_triton

        return causal_conv_triton(x_BTGC, weight_C1K, bias_C, sections)
    return causal_conv_reference(x_BTGC, weight_C1K, bias_C, sections)


def causal_conv_reference(x_BTGC: Tensor, weight_C1K: Tensor, bias_C: Tensor, sections: tuple[int, ...]) -> Tensor:
    """The same in plain torch, in the format of the weights, which is the wider one."""
    channels, _, reach = weight_C1K.shape
    x_BCT = F.pad(x_BTGC.flatten(2).transpose(1, 2).to(weight_C1K.dtype), (reach - 1, 0))
    y_BTC = F.silu(F.conv1d(x_BCT, weight_C1K, bias_C, groups=channels)).transpose(1, 2).to(x_BTGC.dtype)
    by_section = y_BTC.unflatten(2, x_BTGC.shape[2:]).split(sections, dim=-1)
    return torch.cat([section_BTGC.flatten(2) for section_BTGC in by_section], dim=-1)
