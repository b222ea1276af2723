"""The short convolution before a Mamba scan: each channel a weighted sum of its last few tokens, then silu.

`causal_conv` takes the Triton kernels (`causal_conv_triton.py`) on a GPU and torch's convolution elsewhere.
Tensor names end in their shape: B sequences, T tokens, C channels, K tokens that the sum reaches over.
"""

import torch.nn.functional as F
from torch import Tensor

from llmb.kernels.triton_device import takes_triton


def causal_conv(x_BTC: Tensor, weight_C1K: Tensor, bias_C: Tensor) -> Tensor:
    """silu(bias + sum over k of weight[k] * x[t - K + 1 + k]), in the format of x; before the first token x is 0."""
    if takes_triton(x_BTC):
        from llmb.kernels.causal_conv_triton import causal_conv_triton

        return causal_conv_triton(x_BTC, weight_C1K, bias_C)
    return causal_conv_reference(x_BTC, weight_C1K, bias_C)


def causal_conv_reference(x_BTC: Tensor, weight_C1K: Tensor, bias_C: Tensor) -> Tensor:
    """The same in plain torch, in the format of the weights, which is the wider one."""
    channels, _, reach = weight_C1K.shape
    x_BCT = F.pad(x_BTC.transpose(1, 2).to(weight_C1K.dtype), (reach - 1, 0))
    return F.silu(F.conv1d(x_BCT, weight_C1K, bias_C, groups=channels)).transpose(1, 2).to(x_BTC.dtype)
