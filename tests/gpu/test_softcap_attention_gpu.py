"""Attention with softcap and sliding window on a GPU at the width of Gemma 2 9B, against plain matmuls in fp32."""

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, peak_allocated, randn, relative_error
from torch import Tensor

from llmb.models.blocks import causal_attention
from llmb.ops.attention.attention_block import PLAIN
from llmb.ops.attention.segment_attention import (
    Segment,
    kernel_for,
    segment_attention_backward,
    segment_attention_forward,
)
from llmb.ops.softcap.softcap_attention import softcap_attention

pytestmark = NEEDS_GPU

HEADS, KV_HEADS, HEAD_DIM, TOKENS, SOFTCAP, SCALE = 16, 8, 256, 8192, 50.0, 256**-0.5
WINDOWS = [None, 4096, 1000, 20]


def heads_of_gemma(queries: int = TOKENS) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of the output, tokens before heads in memory.

    The largest logits are above half of the softcap, where it changes them by a tenth.
    """
    shapes = ((queries, HEADS, 2.5), (TOKENS, KV_HEADS, 2.5), (TOKENS, KV_HEADS, 1), (queries, HEADS, 1))
    return tuple(
        (scale * randn(1, tokens, heads, HEAD_DIM, seed=seed)).transpose(1, 2)
        for seed, (tokens, heads, scale) in enumerate(shapes)
    )


def by_plain_matmuls(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, window: int | None) -> list[Tensor]:
    """Return the output and all gradients, of a chunk of queries at a time in fp32."""
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out = softcap_attention.reference(*leaves, SCALE, SOFTCAP, window)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]


@pytest.mark.parametrize("window", WINDOWS)
def test_whole_sequences_equal_plain_matmuls(window: int | None) -> None:
    q, k, v, dout = heads_of_gemma()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves, SCALE, SOFTCAP, window)
    actual = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for name, x, exact in zip(("out", "dq", "dk", "dv"), actual, by_plain_matmuls(q, k, v, dout, window), strict=True):
        assert relative_error(x, exact) < 0.02, name


@pytest.mark.parametrize("window", [None, 4096])
def test_memory_is_linear_in_the_sequence(window: int | None) -> None:
    """Output and gradients, and two numbers for each query and head; logits would take 64 times as much."""
    *inputs, dout = heads_of_gemma()
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward_and_backward() -> None:
        torch.autograd.grad(causal_attention(*leaves, SCALE, SOFTCAP, window), leaves, dout)

    forward_and_backward()  # compiles
    results = 2 * sum(x.numel() * x.element_size() for x in inputs)
    assert peak_allocated(forward_and_backward) < 1.1 * results


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queries", [2048, 1000])
def test_last_chunk_of_a_sequence_equals_plain_matmuls(queries: int, window: int | None) -> None:
    """As out of core: keys before the chunk are one call, or within a window one with those of the chunk."""
    tensors, context = heads_of_gemma(queries), TOKENS - queries
    q, k, v, dout = (x[0].transpose(0, 1).contiguous() for x in tensors)
    kv, segments = (k[context:], v[context:], k[:context], v[:context]), [Segment(0, queries, 0, context)]
    assert kernel_for(q, segments, window, SOFTCAP) is not PLAIN
    out, lse = segment_attention_forward(q, *kv, segments, SCALE, window=window, softcap=SOFTCAP)
    dq, grads = torch.empty_like(q), [torch.empty_like(x, dtype=torch.float32) for x in kv]
    segment_attention_backward(
        dout, q, *kv, out, lse, segments, dq, *grads, False, SCALE, window=window, softcap=SOFTCAP
    )  # fmt: skip
    actual = (out, dq, torch.cat((grads[2], grads[0])), torch.cat((grads[3], grads[1])))
    expected = by_plain_matmuls(*tensors, window)
    for name, x, exact in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(x, exact[0].transpose(0, 1)) < 0.02, name


def test_packed_sequences_equal_each_alone() -> None:
    q, k, v, dout = (x[0].transpose(0, 1).contiguous() for x in heads_of_gemma())
    segments = [Segment(0, 3000, 0, 0), Segment(3000, 3100, 3000, 3000), Segment(3100, TOKENS, 3100, 3100)]
    none = (k[:0], v[:0])
    out, lse = segment_attention_forward(q, k, v, *none, segments, SCALE, window=1000, softcap=SOFTCAP)
    dq, grads = torch.empty_like(q), [torch.empty_like(x, dtype=torch.float32) for x in (k, v, *none)]
    segment_attention_backward(
        dout, q, k, v, *none, out, lse, segments, dq, *grads, False, SCALE, window=1000, softcap=SOFTCAP
    )  # fmt: skip
    for segment in segments:
        rows = slice(segment.start, segment.end)
        alone = (x[rows].transpose(0, 1)[None] for x in (q, k, v, dout))
        for x, exact in zip((out, dq, grads[0], grads[1]), by_plain_matmuls(*alone, 1000), strict=True):
            assert relative_error(x[rows], exact[0].transpose(0, 1)) < 0.02


def test_kernels_are_taken_on_this_device() -> None:
    q = torch.empty(8, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    assert kernel_for(q, [Segment(0, 8, 0, 0)], 4, SOFTCAP) is not PLAIN
