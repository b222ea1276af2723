"""Causal attention of a sequence chunk whose documents may have begun before it, forward and backward.

    out_NHD, lse_HN = segment_attention_forward(q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, segments, scale)
    segment_attention_backward(dout_NHD, q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, out_NHD, lse_HN, segments, dq_NHD, dk_NGD,
                               dv_NGD, dk_TGD, dv_TGD, accumulate, scale)

The scores of a segment are a causal triangle over the chunk's keys and, where its document began earlier, a full
rectangle over keys of the context. The triangles of all segments are one kernel call, each rectangle another, and the
two are merged by their log-sum-exps. So kernels need no positions, and the fastest one can be used
(`attention_block.py`). Both parts are functions of their own, for callers that communicate in between.

A sliding window that is shorter than a document cuts a diagonal out of the rectangle as well. Then each segment with a
context is one kernel call, over the keys that any of its queries sees (`windowed_forward`, `windowed_backward`).

With a softcap log-sum-exps are those of the logits under it, so the two parts are merged in the same way.

Out-of-core training passes views of one buffer, in which the chunk follows its context. With context parallelism the
chunk's keys are local and the context is gathered from all ranks.

Shapes: N queries and keys of the chunk, T keys of the context, H heads, G KV heads, D head_dim.
"""

import importlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.attention.attention_block import CUDNN, FLASH, PLAIN, AttentionBlock, AttentionKernel
from llmb.ops.attention.flash_attention_4 import FLASH4, MIN_TOKENS
from llmb.ops.attention.merge_lse import merge_attn_states
from llmb.ops.device_capabilities import capabilities
from llmb.ops.dispatch import takes_triton
from llmb.ops.softcap.softcap_attention import kernel_takes_heads

# Keys of a rectangle in one call. In the backward pass cuDNN holds gradients of as many keys for each query head; with
# fewer keys dq is rounded and added more often.
KEY_BLOCK = 65536
RECURRING_MULTIPLE = 256  # a context of a multiple of this comes from equal chunks, not from a document's length


class Segment(NamedTuple):
    """Tokens of one document in a chunk, which see their own keys causally. Segments tile their chunk."""

    start: int  # rows [start, end) of the chunk
    end: int
    context_start: int  # rows [context_start, causal_start) of the context are seen in full
    causal_start: int  # where the chunk is part of the context, the segment's own rows begin here


def chunk_segments(document_starts: Sequence[int], start: int, end: int) -> tuple[Segment, ...]:
    """Return the segments of a chunk, rows [start, end) of a context with documents at these rows, the first at 0."""
    documents = document_starts[bisect_right(document_starts, start) - 1 : bisect_left(document_starts, end)]
    segments = []
    for context_start, stop in zip(documents, [*documents[1:], end], strict=True):
        causal_start = max(context_start, start)
        segments.append(Segment(causal_start - start, stop - start, context_start, causal_start))
    return tuple(segments)


def chunk_rows(segments: Sequence[Segment]) -> slice:
    """Return the rows of the context that are the chunk, where it is contiguous in the context."""
    offsets = {segment.causal_start - segment.start for segment in segments}
    assert len(offsets) == 1, "a chunk is contiguous"
    start = offsets.pop()
    return slice(start, start + sum(_lengths(segments)))


def segment_attention_forward(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    segments: Sequence[Segment],
    scale: float,
    key_block: int = KEY_BLOCK,
    out: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each row's scaled scores in fp32: copied into `out`, or as the kernel
    allocated them."""
    window = shorter_window(segments, window)
    if window is None:
        out_NHD, lse_HN = causal_forward(q_NHD, k_NGD, v_NGD, segments, scale, softcap)
    else:
        out_NHD, lse_HN = windowed_forward(q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, segments, scale, window, softcap)
    if out is not None:
        out_NHD, lse_HN = (buffer.copy_(x) for buffer, x in zip(out, (out_NHD, lse_HN), strict=True))
    if window is not None:
        return out_NHD, lse_HN
    context_forward(q_NHD, k_TGD, v_TGD, segments, out_NHD, lse_HN, scale, key_block, softcap)
    return out_NHD, lse_HN


def segment_attention_backward(
    dout_NHD: Tensor,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_NHD: Tensor,
    lse_HN: Tensor,
    segments: Sequence[Segment],
    dq_NHD: Tensor,
    dk_NGD: Tensor,
    dv_NGD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
    accumulate: bool,
    scale: float,
    key_block: int = KEY_BLOCK,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Set `dq`, and accumulate `dk` and `dv` of the chunk and of its context; without `accumulate` set these, too.

    dq may be a strided view. Gradients of the context are best in fp32: many rectangles may add to them.
    """
    window = shorter_window(segments, window)
    if window is not None and not accumulate:
        dk_TGD.zero_()
        dv_TGD.zero_()
    operands, results = (dout_NHD, q_NHD, k_NGD, v_NGD), (out_NHD, lse_HN, segments)
    if window is None:
        grads = causal_backward(*operands, *results, scale, None, softcap)
    else:
        grads = windowed_backward(*operands, k_TGD, v_TGD, *results, dk_TGD, dv_TGD, scale, window, softcap)
    dq_NHD.copy_(grads[0])
    for buffer_NGD, grad_NGD in zip((dk_NGD, dv_NGD), grads[1:], strict=True):
        buffer_NGD.add_(grad_NGD) if accumulate else buffer_NGD.copy_(grad_NGD)
    del grads, grad_NGD  # before rectangles are allocated
    if window is not None:
        return
    if not accumulate:
        dk_TGD.zero_()
        dv_TGD.zero_()
    context_backward(
        dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, segments, dq_NHD, dk_TGD, dv_TGD, scale, key_block, softcap
    )


def causal_forward(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, segments: Sequence[Segment], scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and log-sum-exp of the causal part, newly allocated."""
    block = AttentionBlock(q_NHD, k_NGD, v_NGD, _lengths(segments), True, scale, softcap=softcap)
    return kernel_for(q_NHD, segments, None, softcap).forward(block)


def causal_backward(
    dout_NHD: Tensor, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    segments: Sequence[Segment], scale: float, window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv of the causal part, newly allocated: of the chunk's queries, keys and values."""
    window = shorter_window(segments, window)
    block = AttentionBlock(q_NHD, k_NGD, v_NGD, _lengths(segments), True, scale, window, softcap)
    return kernel_for(q_NHD, segments, window, softcap).backward(dout_NHD, block, out_NHD, lse_HN)


def context_forward(
    q_NHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, segments: Sequence[Segment], out_NHD: Tensor, lse_HN: Tensor,
    scale: float, key_block: int = KEY_BLOCK, softcap: float | None = None,
) -> None:  # fmt: skip
    """Merge the attention to the context into `out` and `lse`, those of the causal part."""
    kernel = kernel_for(q_NHD, segments, None, softcap)
    for rows, keys in _rectangles(segments, key_block):
        lengths = (rows.stop - rows.start,)
        block = AttentionBlock(q_NHD[rows], k_TGD[keys], v_TGD[keys], lengths, False, scale, softcap=softcap)
        context_out_NHD, context_lse_HN = kernel.forward(block)
        merge_attn_states(out_NHD[rows], lse_HN[:, rows], context_out_NHD, context_lse_HN)
        del context_out_NHD, context_lse_HN  # before the next is allocated


def context_backward(
    dout_NHD: Tensor, q_NHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    segments: Sequence[Segment], dq_NHD: Tensor, dk_TGD: Tensor, dv_TGD: Tensor, scale: float,
    key_block: int = KEY_BLOCK, softcap: float | None = None,
) -> None:  # fmt: skip
    """Add the gradients from the context to `dq`, and those of the context to `dk` and `dv`."""
    kernel = kernel_for(q_NHD, segments, None, softcap)
    for rows, keys in _rectangles(segments, key_block):
        lengths = (rows.stop - rows.start,)
        block = AttentionBlock(q_NHD[rows], k_TGD[keys], v_TGD[keys], lengths, False, scale, softcap=softcap)
        context_dq_NHD, context_dk_KGD, context_dv_KGD = kernel.backward(
            dout_NHD[rows], block, out_NHD[rows], lse_HN[:, rows]
        )
        dq_NHD[rows].add_(context_dq_NHD)
        dk_TGD[keys].add_(context_dk_KGD)
        dv_TGD[keys].add_(context_dv_KGD)
        del context_dq_NHD, context_dk_KGD, context_dv_KGD


def shorter_window(segments: Sequence[Segment], window: int | None) -> int | None:
    """Return the window, or None if no query has more keys than that before and with it."""
    return window if window is not None and longest_segment(segments) > window else None


def longest_segment(segments: Sequence[Segment]) -> int:
    """Return the most tokens of a document up to the end of its segment."""
    return max(segment.end - segment.start + segment.causal_start - segment.context_start for segment in segments)


def windowed_forward(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, k_TGD: Tensor, v_TGD: Tensor, segments: Sequence[Segment],
    scale: float, window: int, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and log-sum-exp of attention with a sliding window, newly allocated."""
    kernel = kernel_for(q_NHD, segments, window, softcap)
    results = [
        kernel.forward(AttentionBlock(q_NHD[rows], k, v, lengths, True, scale, window, softcap))
        for rows, _, lengths, (k, v) in _windowed_blocks(segments, window, (k_NGD, v_NGD), (k_TGD, v_TGD))
    ]
    outs, lses = zip(*results, strict=True)
    return (outs[0], lses[0]) if len(results) == 1 else (torch.cat(outs), torch.cat(lses, dim=1))


def windowed_backward(
    dout_NHD: Tensor, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_NHD: Tensor,
    lse_HN: Tensor, segments: Sequence[Segment], dk_TGD: Tensor, dv_TGD: Tensor, scale: float, window: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv of the chunk, newly allocated, and add the gradients of the context to `dk` and `dv`."""
    grads, kernel = [], kernel_for(q_NHD, segments, window, softcap)
    for rows, keys, lengths, (k, v) in _windowed_blocks(segments, window, (k_NGD, v_NGD), (k_TGD, v_TGD)):
        block = AttentionBlock(q_NHD[rows], k, v, lengths, True, scale, window, softcap)
        dq, dk, dv = kernel.backward(dout_NHD[rows], block, out_NHD[rows], lse_HN[:, rows])
        context = keys.stop - keys.start
        dk_TGD[keys].add_(dk[:context])
        dv_TGD[keys].add_(dv[:context])
        grads.append((dq, dk[context:], dv[context:]))
    dq_NHD, dk_NGD, dv_NGD = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*grads, strict=True))
    return dq_NHD, dk_NGD, dv_NGD


def _windowed_blocks(
    segments: Sequence[Segment], window: int, chunk: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
) -> Iterator[tuple[slice, slice, tuple[int, ...], tuple[Tensor, ...]]]:
    """Yield rows of the chunk, rows of the context before them, lengths of sequences, and the keys and values of both.

    Segments without a context are one block; each other segment is its own.
    """
    if all(segment.context_start == segment.causal_start for segment in segments):
        yield slice(0, segments[-1].end), slice(0, 0), _lengths(segments), chunk
        return
    for segment in segments:
        rows = slice(segment.start, segment.end)
        keys = slice(max(segment.context_start, segment.causal_start - window + 1), segment.causal_start)
        pairs = zip(context, chunk, strict=True)
        kv = tuple(torch.cat((context_x[keys], chunk_x[rows])) for context_x, chunk_x in pairs)
        yield rows, keys, (segment.end - segment.start,), kv


def kernel_for(
    q_NHD: Tensor, segments: Sequence[Segment], window: int | None = None, softcap: float | None = None
) -> AttentionKernel:
    """Return the kernel for this chunk; it depends only on device, dtype and segments, so equal runs stay equal."""
    if softcap is not None:
        return _softcap_kernel() if takes_triton(q_NHD) and kernel_takes_heads(q_NHD, softcap) else PLAIN
    head_dim = q_NHD.shape[-1]
    if not q_NHD.is_cuda or q_NHD.dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return PLAIN
    gpu = capabilities(q_NHD.device)
    if gpu.has("flash_attention_4") and longest_segment(segments) >= MIN_TOKENS:
        return FLASH4
    if window is None and gpu.has("cudnn_attention") and head_dim <= 128 and _is_recurring(segments):
        return CUDNN
    return FLASH if gpu.has("flash_attention") else PLAIN


@cache
def _softcap_kernel() -> AttentionKernel:
    """Import Triton only where it is needed."""
    return importlib.import_module("llmb.ops.softcap.softcap_block_triton").SOFTCAP


def _is_recurring(segments: Sequence[Segment]) -> bool:
    """Return whether chunks like this recur: whole sequences of one length, or equal chunks of long ones."""
    return len(set(_lengths(segments))) == 1 and all(
        (segment.causal_start - segment.context_start) % RECURRING_MULTIPLE == 0 for segment in segments
    )


def _lengths(segments: Sequence[Segment]) -> tuple[int, ...]:
    ends = [segment.end for segment in segments]
    assert [0, *ends[:-1]] == [segment.start for segment in segments], "segments tile a chunk"
    return tuple(segment.end - segment.start for segment in segments)


def _rectangles(segments: Sequence[Segment], key_block: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows of the chunk and rows of the context that they see in full, at most `key_block` at a time."""
    for segment in segments:
        for first in range(segment.context_start, segment.causal_start, key_block):
            yield slice(segment.start, segment.end), slice(first, min(first + key_block, segment.causal_start))
