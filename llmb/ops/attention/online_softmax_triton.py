"""Online softmax for attention kernels: its running state, and the log-sum-exp merge of split-KV.

A kernel holds for each query the running maximum of its logits, the sum of exponentials relative to it, and the
accumulated values. Logits are in units of log2, so that exponentials are exp2, which GPUs compute.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MASKED = tl.constexpr(-1e30)  # logit of a masked key; infinities would make NaN of a tile without any key


@triton.jit
def apply_softcap(logits, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return softcap * tanh(logits / softcap), all in units of log2."""
    if HAS_SOFTCAP:
        y = logits / (softcap * 1.4426950408889634)
        logits = softcap * 1.4426950408889634 * (2 * tl.sigmoid(2 * y) - 1)
    return logits


@triton.jit
def sink_logits(sinks_ptr, heads, mask):
    """Return the logits of attention sinks, in units of log2, with which running softmaxes begin, with a sum of 1."""
    return tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def softmax_step(row_max, row_sum, acc, logits, v, value_scale):
    """Update the running softmax with a tile: logits [queries, keys], masked where unseen, and values [keys, width]."""
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    p = tl.exp2(logits - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee") * value_scale
    return new_max, row_sum, acc


@triton.jit
def attend_tile(
    row_max, row_sum, acc, q, k, v, visible, scale, value_scale, softcap,
    COMPUTE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with a tile of a cache: keys [keys, width], values [width, keys].

    `visible` broadcasts to [queries, keys].
    """
    logits = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee") * scale
    logits = tl.where(visible, apply_softcap(logits, softcap, HAS_SOFTCAP), MASKED)
    return softmax_step(row_max, row_sum, acc, logits, tl.trans(v.to(COMPUTE)), value_scale)


@triton.jit
def split_weights(lse, AXIS: tl.constexpr):
    """Return exp2(lse - max) along the axis of splits, their weights in the merged softmax before normalization.

    Also returns the maximum, or 0 where all splits are empty (-inf).
    """
    top = tl.max(lse, AXIS)
    top = tl.where(top == float("-inf"), 0.0, top)
    if AXIS == 1:
        return tl.exp2(lse - top[:, None]), top
    else:
        return tl.exp2(lse - top), top


def num_kv_splits(sequences: int, kv_heads: int, max_seq_len: int, programs: int, min_tokens: int, limit: int) -> int:
    """Return into how many splits the KV of a sequence goes, to have `programs` in all: a power of two.

    No split should have fewer than `min_tokens` tokens of the longest sequence.
    """
    splits = min(programs // max(sequences * kv_heads, 1), max_seq_len // min_tokens, limit)
    return 1 << max(splits.bit_length() - 1, 0)


def mma_dtype(cache_dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which attention multiplies cached keys and values: fp16 holds all of e4m3 exactly."""
    return {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}.get(cache_dtype, tl.float16)
