"""Segment attention against one masked softmax and its autograd; calls of GPU kernels on meta tensors."""

import pytest
import torch
from torch import Tensor

from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import CUDNN, FLASH, PLAIN, AttentionBlock
from llmb.ops.attention.merge_lse import merge_attn_states
from llmb.ops.attention.segment_attention import (
    Segment,
    chunk_rows,
    segment_attention_backward,
    segment_attention_forward,
)

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.3
SEGMENTS = {
    "whole sequence": [Segment(0, 12, 0, 0)],
    "later chunk of a sequence": [Segment(0, 7, 0, 12)],
    "three sequences of one length": [Segment(0, 5, 0, 0), Segment(5, 10, 5, 5), Segment(10, 15, 10, 10)],
    "packed, the first continued": [Segment(0, 3, 4, 9), Segment(3, 4, 12, 12), Segment(4, 10, 13, 13)],
    "several continued": [Segment(0, 3, 0, 9), Segment(3, 8, 2, 12)],
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_mask(segments: list[Segment], context: int) -> Tensor:
    mask = torch.zeros(segments[-1].end, context, dtype=torch.bool)
    for segment in segments:
        for row in range(segment.start, segment.end):
            mask[row, segment.context_start : segment.causal_start + row - segment.start + 1] = True
    return mask


def by_autograd(q, k, v, segments, dout):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    repeated_k, repeated_v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,khd->hnk", q, repeated_k) * SCALE
    scores = scores.masked_fill(~attention_mask(segments, len(k)), -torch.inf)
    out = torch.einsum("hnk,khd->nhd", scores.softmax(-1), repeated_v)
    return (out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), dout))


def inputs(segments: list[Segment], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    rows, context = segments[-1].end, chunk_rows(segments).stop
    q, dout = (randn(rows, HEADS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    k, v = (randn(context, GROUPS, WIDTH, seed=seed, dtype=dtype) for seed in (3, 4))
    return q, k, v, dout


@pytest.mark.parametrize("key_block", [2, 100])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_forward_and_backward_equal_one_masked_softmax(segments, key_block, monkeypatch):
    monkeypatch.setattr(
        "llmb.ops.attention.attention_block.MAX_PLAIN_SCORES", 64
    )  # so that there are several blocks of rows
    q, k, v, dout = inputs(segments)
    out, lse = torch.empty_like(q), torch.empty(HEADS, len(q))
    segment_attention_forward(q, k, v, segments, SCALE, key_block, out=(out, lse))
    padded = torch.full((len(q), HEADS + 3, WIDTH), 7.0)
    dk, dv = (randn(*k.shape, seed=seed) for seed in (5, 6))
    before = dk.clone(), dv.clone()
    segment_attention_backward(dout, q, k, v, out, lse, segments, padded[:, :HEADS], dk, dv, True, SCALE, key_block)
    actual = out, lse, padded[:, :HEADS], dk - before[0], dv - before[1]
    expected = by_autograd(q, k, v, segments, dout)
    for name, x, exact in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert bool((padded[:, HEADS:] == 7).all())


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_gradients_are_set_without_accumulate(segments):
    q, k, v, dout = inputs(segments)
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, len(q)), torch.empty_like(q)
    segment_attention_forward(q, k, v, segments, SCALE, out=(out, lse))
    dk, dv = (torch.full_like(k, torch.nan) for _ in range(2))
    segment_attention_backward(dout, q, k, v, out, lse, segments, dq, dk, dv, False, SCALE)
    expected = by_autograd(q, k, v, segments, dout)
    torch.testing.assert_close((dk, dv), expected[3:], rtol=1e-4, atol=1e-5)


def test_chunks_of_a_sequence_accumulate_to_the_whole():
    whole = [Segment(0, 20, 0, 0)]
    q, k, v, dout = inputs(whole)
    expected = by_autograd(q, k, v, whole, dout)
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, 20), torch.empty_like(q)
    chunks = [
        (slice(0, 8), [Segment(0, 8, 0, 0)]),
        (slice(8, 11), [Segment(0, 3, 0, 8)]),
        (slice(11, 20), [Segment(0, 9, 0, 11)]),
    ]
    for rows, segments in chunks:
        segment_attention_forward(
            q[rows], k[: rows.stop], v[: rows.stop], segments, SCALE, out=(out[rows], lse[:, rows])
        )
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for rows, segments in reversed(chunks):
        segment_attention_backward(
            dout[rows], q[rows], k, v, out[rows], lse[:, rows], segments, dq[rows], dk, dv, rows.stop != 20, SCALE
        )
    torch.testing.assert_close((out, lse, dq, dk, dv), expected, rtol=1e-4, atol=1e-5)


def test_bf16_with_fp32_gradients_of_keys():
    segments = SEGMENTS["packed, the first continued"]
    q, k, v, dout = inputs(segments, torch.bfloat16)
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, len(q)), torch.empty_like(q)
    segment_attention_forward(q, k, v, segments, SCALE, out=(out, lse))
    dk, dv = (torch.zeros(k.shape) for _ in range(2))
    segment_attention_backward(dout, q, k, v, out, lse, segments, dq, dk, dv, True, SCALE)
    expected = by_autograd(*(x.float() for x in (q, k, v)), segments, dout.float())
    for x, exact in zip((out, lse, dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(x.float(), exact, rtol=2e-2, atol=2e-2)


def test_segments_that_do_not_tile_their_chunk_are_refused():
    with pytest.raises(AssertionError, match="segments tile"):
        chunk_rows([Segment(0, 3, 0, 0), Segment(4, 6, 4, 4)])
    with pytest.raises(AssertionError, match="contiguous"):
        chunk_rows([Segment(0, 3, 0, 0), Segment(3, 6, 4, 4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "width"), [(13, 6, 16), (8, 4, 24)])
def test_merge_kernel_takes_strided_tensors(rows, heads, width, dtype, device):
    padded = randn(rows + 2, heads + 1, width, seed=1, dtype=dtype).to(device)
    padded_lse = randn(heads, rows + 5, seed=2).to(device) * 3
    second = randn(rows, heads, width, seed=3, dtype=dtype).to(device)
    second_lse = randn(heads, rows, seed=4).to(device) * 3
    actual, expected = (padded.clone(), padded_lse.clone()), (padded.clone(), padded_lse.clone())
    for merge, (out, lse) in ((merge_attn_states.triton, actual), (merge_attn_states.reference, expected)):
        merge(out[1:-1, :heads], lse[:, 2:-3], second, second_lse)
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_merging_with_a_negligible_weight_changes_nothing():
    out, lse = randn(3, HEADS, WIDTH), randn(HEADS, 3)
    merged, merged_lse = out.clone(), lse.clone()
    merge_attn_states(merged, merged_lse, randn(3, HEADS, WIDTH, seed=1) * 1e6, lse - 200)
    torch.testing.assert_close((merged, merged_lse), (out, lse))


@pytest.mark.parametrize("kernel", [CUDNN, FLASH], ids=["cudnn", "flash"])
@pytest.mark.parametrize("name", ["whole sequence", "later chunk of a sequence", "three sequences of one length"])
def test_gpu_kernel_calls_match_the_installed_torch(name, kernel, monkeypatch):
    """On meta tensors: argument names and orders, shapes and layouts."""
    segments = SEGMENTS[name]
    monkeypatch.setattr(segment_attention, "kernel_for", lambda *_: kernel)
    q, k, v, dout = (x.to("meta") for x in inputs(segments, torch.bfloat16))
    lengths, chunk = segment_attention._lengths(segments), chunk_rows(segments)
    block = AttentionBlock(q, k[chunk], v[chunk], lengths, True, SCALE)
    out, lse = kernel.forward(block)
    assert out.is_contiguous()
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (HEADS, len(q)), torch.float32)
    grads = kernel.backward(dout, block, out, lse)
    assert [x.shape for x in grads] == [q.shape, k[chunk].shape, v[chunk].shape]
    assert all(x.is_contiguous() for x in grads)
    segment_attention_forward(q, k, v, segments, SCALE, out=(out, lse))
    segment_attention_backward(
        dout, q, k, v, out, lse, segments, torch.empty_like(q), k.float(), v.float(), False, SCALE
    )


def test_only_recurring_sizes_use_cudnn(monkeypatch):
    monkeypatch.setattr(segment_attention, "_has_fast_cudnn", lambda _device: True)

    class CudaTensor:
        is_cuda, dtype, device = True, torch.bfloat16, None

        def __init__(self, width: int):
            self.shape = (1, 1, width)

    def selected(segments, width=128):
        return segment_attention.kernel_for(CudaTensor(width), segments)

    assert selected([Segment(0, 8192, 0, 0), Segment(8192, 16384, 8192, 8192)]) is CUDNN
    assert selected([Segment(0, 16384, 0, 49152)]) is CUDNN
    assert selected([Segment(0, 16384, 0, 49152)], width=192) is FLASH
    assert selected([Segment(0, 16384, 0, 49152)], width=12) is PLAIN
    assert selected([Segment(0, 16384, 0, 49151)]) is FLASH
    assert selected([Segment(0, 300, 0, 0), Segment(300, 16384, 300, 300)]) is FLASH
