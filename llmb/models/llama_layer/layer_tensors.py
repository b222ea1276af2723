"""The tensors of a layer, by name.

Shapes: N tokens of a chunk, T tokens of a context, C hidden width, A width of all heads, W of all heads of keys, H
heads, F width of the MLP.
"""

from typing import Any, NamedTuple

from torch import Tensor

# What products took going forward, by name and in the form that their way back takes; what is missing is made again.
Inputs = dict[str, Any]


class BlockWeights(NamedTuple):
    """Of one layer; products are x @ weight.T."""

    wqkv_XC: Tensor  # X: A for the queries, W for the keys, W for the values
    wo_CA: Tensor
    w13_2FC: Tensor  # gate, then up
    w2_CF: Tensor
    norm1_C: Tensor
    norm2_C: Tensor


class KeyValues(NamedTuple):
    """Of a context in one layer, keys with their positions; or the slopes of these."""

    k_TW: Tensor
    v_TW: Tensor


class Attn(NamedTuple):
    """What a chunk's attention gave."""

    out_NA: Tensor
    lse_HN: Tensor  # fp32


class Rest(NamedTuple):
    """What else the way back wants to know."""

    q_NA: Tensor  # with its positions
    resid_NC: Tensor  # the stream behind the attention
    h13_N2F: Tensor  # gate, then up
