"""Attention's softmax over keys that come tile by tile, for kernels: what they hold of it, and how a tile is added.

A kernel keeps for each query the highest logit so far, the sum of powers relative to it, and the values mixed by them.
Logits count in powers of two, which GPUs compute.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
FAR = tl.constexpr(-1e30)  # a logit that weighs nothing; infinities would make NaN of a tile without any key


@triton.jit
def capped(x, cap, CAPPED: tl.constexpr):
    """Logits squeezed to +-cap."""
    if CAPPED:
        y = x / (cap * 1.4426950408889634)
        x = cap * 1.4426950408889634 * (2 * tl.sigmoid(2 * y) - 1)
    return x


@triton.jit
def with_tile(top, total, mixed, x, v, value_scale):
    """The softmax so far with one more tile: logits x [queries, keys], far where unseen, and values v [keys, width]."""
    higher = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(p, 1)
    mixed = mixed * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee") * value_scale
    return higher, total, mixed


def shares_of(parts: int, kv_heads: int, longest: int, programs: int, shortest: int, most: int) -> int:
    """Among how many programs a sequence's tokens are divided, to have `programs` in all: a power of two.

    None should have fewer than `shortest` tokens of the longest sequence.
    """
    wanted = min(programs // max(parts * kv_heads, 1), longest // shortest, most)
    return 1 << max(wanted.bit_length() - 1, 0)
