"""Sliding windows on a GPU: FlashAttention's window, forward and backward, against masked attention in fp32."""

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, relative_error

from llmb.ops.attention.attention_block import FLASH
from llmb.ops.attention.attention_metadata import causal_mask
from llmb.ops.attention.segment_attention import (
    Segment,
    kernel_for,
    segment_attention_backward,
    segment_attention_forward,
)
from llmb.ops.attention.window_attention import window_attention

pytestmark = NEEDS_GPU

HEADS, KV_HEADS, TOKENS, SCALE = 8, 2, 1024, 0.1


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Return attention of the last queries of all keys, [B, H, Q, D], in fp32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = (q @ k.mT) * SCALE
    mask = causal_mask(q.shape[2], k.shape[2], q.device, window)
    return logits.masked_fill(~mask, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [2, 100, 512])
def test_window_attention_equals_masked_attention(head_dim: int, window: int) -> None:
    generator = torch.Generator(GPU).manual_seed(1)
    shapes = [(2, heads, TOKENS, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, dout = (torch.randn(shape, device=GPU, generator=generator).bfloat16() for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.float().requires_grad_() for x in inputs]
    out, expected = window_attention(*leaves, SCALE, window), masked_attention(*exact, window)
    actual_grads = torch.autograd.grad(out, leaves, dout)
    expected_grads = torch.autograd.grad(expected, exact, dout.float())
    for actual, reference in zip((out, *actual_grads), (expected, *expected_grads), strict=True):
        assert relative_error(actual.float(), reference) < 0.01


def test_a_later_chunk_sees_the_window_of_its_context() -> None:
    """Queries are the last 256 of 1,024 tokens: bottom-right aligned, in one call of FlashAttention."""
    generator = torch.Generator(GPU).manual_seed(2)
    q, dout = (torch.randn(256, HEADS, 128, device=GPU, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(TOKENS, KV_HEADS, 128, device=GPU, generator=generator).bfloat16() for _ in range(2))
    segments, window, context = [Segment(0, 256, 0, TOKENS - 256)], 300, TOKENS - 256
    assert kernel_for(q, segments, window) is FLASH
    kv = (k[context:], v[context:], k[:context], v[:context])
    out, lse = segment_attention_forward(q, *kv, segments, SCALE, window=window)
    dq, grads = torch.empty_like(q), [torch.zeros_like(x, dtype=torch.float32) for x in kv]
    segment_attention_backward(dout, q, *kv, out, lse, segments, dq, *grads, False, SCALE, window=window)
    exact = [x.float().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    expected = masked_attention(*exact, window)
    expected_grads = torch.autograd.grad(expected, exact, dout.float().transpose(0, 1)[None])
    actual = (out, dq, torch.cat((grads[2], grads[0])), torch.cat((grads[3], grads[1])))
    for x, reference in zip(actual, (expected, *expected_grads), strict=True):
        assert relative_error(x.float(), reference[0].transpose(0, 1)) < 0.01
