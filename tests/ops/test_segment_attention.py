"""Segment attention against one masked softmax and its autograd; calls of GPU kernels on meta tensors."""

import pytest
import torch
from seeded_tensors import randn
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
from llmb.ops.device_capabilities import DeviceCapabilities

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.3
SEGMENTS = {
    "whole sequence": [Segment(0, 12, 0, 0)],
    "later chunk of a sequence": [Segment(0, 7, 0, 12)],
    "three sequences of one length": [Segment(0, 5, 0, 0), Segment(5, 10, 5, 5), Segment(10, 15, 10, 10)],
    "packed, the first continued": [Segment(0, 3, 4, 9), Segment(3, 4, 12, 12), Segment(4, 10, 13, 13)],
    "several continued": [Segment(0, 3, 0, 9), Segment(3, 8, 2, 12), Segment(8, 12, 5, 5)],  # not in their context
}


def attention_mask(segments: list[Segment], context: int, window: int | None = None) -> Tensor:
    """Return which keys of the context, then of the chunk, each row sees."""
    mask = torch.zeros(segments[-1].end, context + segments[-1].end, dtype=torch.bool)
    for segment in segments:
        mask[segment.start : segment.end, segment.context_start : segment.causal_start] = True
        for row in range(segment.start, segment.end):
            mask[row, context + segment.start : context + row + 1] = True
            if window is not None:
                oldest = row - segment.start - window + 1  # after the segment's first row, in its own positions
                mask[row, context + segment.start : context + segment.start + max(0, oldest)] = False
                mask[row, : max(0, segment.causal_start + oldest)] = False
                mask[row, : segment.context_start] = False
    return mask


def by_autograd(q, k, v, context_k, context_v, segments, dout, window=None, softcap=None):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, context_k, context_v)]
    q, k, v = leaves[0], torch.cat((leaves[3], leaves[1])), torch.cat((leaves[4], leaves[2]))
    repeated_k, repeated_v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,khd->hnk", q, repeated_k) * SCALE
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attention_mask(segments, len(context_k), window), -torch.inf)
    out = torch.einsum("hnk,khd->nhd", scores.softmax(-1), repeated_v)
    return (out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout))


def inputs(segments: list[Segment], dtype: torch.dtype = torch.float32, width: int = WIDTH) -> tuple[Tensor, ...]:
    """Return queries, keys and values of the chunk and of its context, and the gradient of the output."""
    rows, context = segments[-1].end, max(segment.causal_start for segment in segments)
    q, dout = (randn(rows, HEADS, width, seed=seed, dtype=dtype) for seed in (1, 2))
    kv = (
        randn(keys, GROUPS, width, seed=seed, dtype=dtype)
        for keys, seed in ((rows, 3), (rows, 4), (context, 5), (context, 6))
    )
    return q, *kv, dout


NAMES = ("out", "lse", "dq", "dk", "dv", "context dk", "context dv")


@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_a_sliding_window_equals_its_masked_softmax(segments, window):
    *qkv, dout = inputs(segments)
    out, lse = segment_attention_forward(*qkv, segments, SCALE, window=window)
    dq, grads = torch.empty_like(qkv[0]), [torch.full_like(x, torch.nan) for x in qkv[1:]]
    segment_attention_backward(dout, *qkv, out, lse, segments, dq, *grads, False, SCALE, window=window)
    expected = by_autograd(*qkv, segments, dout, window)
    for name, x, exact in zip(NAMES, (out, lse, dq, *grads), expected, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_a_softcap_equals_its_masked_softmax(segments, window):
    assert_softcap_equals_masked_softmax(segments, window)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are exact in the interpreter only")
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered")  # queries beyond the last see no key
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["three sequences of one length", "several continued"])
def test_softcap_kernel_equals_its_masked_softmax(name, window, monkeypatch):
    """In Triton's interpreter, and in fp32, in which they are compared as closely as the plain ones."""
    kernel = segment_attention._softcap_kernel()
    monkeypatch.setattr(segment_attention, "kernel_for", lambda *_: kernel)
    assert_softcap_equals_masked_softmax(SEGMENTS[name], window)


def assert_softcap_equals_masked_softmax(segments, window):
    *qkv, dout = inputs(segments, width=16)
    qkv[0] *= 3
    out, lse = segment_attention_forward(*qkv, segments, SCALE, window=window, softcap=2.0)
    dq, grads = torch.empty_like(qkv[0]), [torch.full_like(x, torch.nan) for x in qkv[1:]]
    segment_attention_backward(dout, *qkv, out, lse, segments, dq, *grads, False, SCALE, window=window, softcap=2.0)
    expected = by_autograd(*qkv, segments, dout, window, 2.0)
    for name, x, exact in zip(NAMES, (out, lse, dq, *grads), expected, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("key_block", [2, 100])
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "set"])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_forward_and_backward_equal_one_masked_softmax(segments, accumulate, key_block, monkeypatch):
    monkeypatch.setattr(
        "llmb.ops.attention.attention_block.MAX_PLAIN_SCORES", 64
    )  # so that there are several blocks of rows
    *qkv, dout = inputs(segments)
    q, rows = qkv[0], len(dout)
    out, lse = torch.empty_like(q), torch.empty(HEADS, rows)
    segment_attention_forward(*qkv, segments, SCALE, key_block, out=(out, lse))
    padded = torch.full((rows, HEADS + 3, WIDTH), 7.0)
    before = [randn(*x.shape, seed=7) if accumulate else torch.full_like(x, torch.nan) for x in qkv[1:]]
    grads = [x.clone() for x in before]
    segment_attention_backward(dout, *qkv, out, lse, segments, padded[:, :HEADS], *grads, accumulate, SCALE, key_block)
    if accumulate:
        grads = [grad - x for grad, x in zip(grads, before, strict=True)]
    actual = out, lse, padded[:, :HEADS], *grads
    for name, x, exact in zip(NAMES, actual, by_autograd(*qkv, segments, dout), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert bool((padded[:, HEADS:] == 7).all())


def test_segments_that_do_not_tile_their_chunk_are_refused():
    with pytest.raises(AssertionError, match="segments tile"):
        chunk_rows([Segment(0, 3, 0, 0), Segment(4, 6, 4, 4)])
    with pytest.raises(AssertionError, match="segments tile"):
        chunk_rows([Segment(1, 3, 1, 1)])
    with pytest.raises(AssertionError, match="contiguous"):
        chunk_rows([Segment(0, 3, 0, 0), Segment(3, 6, 4, 4)])


def test_merging_with_a_negligible_weight_changes_nothing():
    out, lse = randn(3, HEADS, WIDTH), randn(HEADS, 3)
    merged, merged_lse = out.clone(), lse.clone()
    merge_attn_states(merged, merged_lse, randn(3, HEADS, WIDTH, seed=1) * 1e6, lse - 200)
    torch.testing.assert_close((merged, merged_lse), (out, lse))


@pytest.mark.parametrize("kernel", [CUDNN, FLASH], ids=["cudnn", "flash"])
@pytest.mark.parametrize("name", ["whole sequence", "later chunk of a sequence", "three sequences of one length"])
@pytest.mark.parametrize("side_by_side", [False, True], ids=["separate", "side by side"])
def test_gpu_kernel_calls_match_the_installed_torch(side_by_side, name, kernel, monkeypatch):
    """On meta tensors: argument names and orders, shapes and layouts; queries, keys and values may be in wider rows."""
    segments = SEGMENTS[name]
    monkeypatch.setattr(segment_attention, "kernel_for", lambda *_: kernel)
    *qkv, dout = (x.to("meta") for x in inputs(segments, torch.bfloat16))
    if side_by_side:
        qkv[:3] = torch.cat(qkv[:3], dim=1).split([x.shape[1] for x in qkv[:3]], dim=1)
    q, k, v = qkv[:3]
    block = AttentionBlock(q, k, v, segment_attention._lengths(segments), True, SCALE)
    out, lse = kernel.forward(block)
    assert out.is_contiguous()
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (HEADS, len(q)), torch.float32)
    grads = kernel.backward(dout, block, out, lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert all(x.is_contiguous() for x in grads)
    segment_attention_forward(*qkv, segments, SCALE, out=(out, lse))
    dkv = [x.float() for x in qkv[1:]]
    segment_attention_backward(dout, *qkv, out, lse, segments, torch.empty_like(q), *dkv, False, SCALE)


def test_only_recurring_sizes_use_cudnn(monkeypatch):
    hopper = DeviceCapabilities(compute=(9, 0))
    monkeypatch.setattr(segment_attention, "capabilities", lambda _device: hopper)

    class CudaTensor:
        is_cuda, dtype, device = True, torch.bfloat16, None

        def __init__(self, width: int):
            self.shape = (1, 1, width)

    def selected(segments, width=128):
        return segment_attention.kernel_for(CudaTensor(width), segments)

    assert selected([Segment(0, 8192, 0, 0), Segment(8192, 16384, 8192, 8192)]) is CUDNN
    assert selected([Segment(0, 16384, 0, 49152)]) is CUDNN
    assert selected([Segment(0, 512, 0, 512), Segment(512, 1024, 0, 3072)]) is CUDNN  # context parallel
    assert selected([Segment(0, 16384, 0, 49152)], width=192) is FLASH
    assert selected([Segment(0, 16384, 0, 49152)], width=12) is PLAIN
    assert selected([Segment(0, 16384, 0, 49151)]) is FLASH
    assert selected([Segment(0, 300, 0, 0), Segment(300, 16384, 300, 300)]) is FLASH


@pytest.mark.parametrize(
    ("width", "softcap", "dtype", "is_triton"),
    [
        (256, 50.0, torch.bfloat16, True),
        (256, 50.0, torch.float32, False),
        (96, 50.0, torch.bfloat16, False),
        (128, 61.0, torch.bfloat16, False),
    ],
)
def test_softcap_kernel_takes_what_its_tiles_fit(width, softcap, dtype, is_triton, monkeypatch):
    monkeypatch.setattr(segment_attention, "takes_triton", lambda _q: True)
    q = torch.empty(8, HEADS, width, dtype=dtype)
    kernel = segment_attention.kernel_for(q, [Segment(0, 8, 0, 0)], 4, softcap)
    assert kernel is (segment_attention._softcap_kernel() if is_triton else PLAIN)
