"""Attention over spans against one masked softmax and its autograd; the calls of GPU kernels by shapes alone."""

import pytest
import torch
from torch import Tensor

from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import CUDNN, FLASH, PLAIN
from llmb.ops.attention.merge_lse import merge_, merge_reference_
from llmb.ops.attention.segment_attention import Span, attend, attend_backward, rows_of

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.3
SPANS = {
    "a whole sequence": [Span(0, 12, 0, 0)],
    "a later part of one": [Span(0, 7, 0, 12)],
    "three of one length": [Span(0, 5, 0, 0), Span(5, 10, 5, 5), Span(10, 15, 10, 10)],
    "packed, the first from earlier": [Span(0, 3, 4, 9), Span(3, 4, 12, 12), Span(4, 10, 13, 13)],
    "several from earlier": [Span(0, 3, 0, 9), Span(3, 8, 2, 12)],
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seen(spans: list[Span], context: int) -> Tensor:
    mask = torch.zeros(spans[-1].end, context, dtype=torch.bool)
    for span in spans:
        for row in range(span.first, span.end):
            mask[row, span.past : span.here + row - span.first + 1] = True
    return mask


def by_autograd(q, k, v, spans, dout):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,khd->hnk", q, wide_k) * SCALE
    scores = scores.masked_fill(~seen(spans, len(k)), -torch.inf)
    out = torch.einsum("hnk,khd->nhd", scores.softmax(-1), wide_v)
    return (out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), dout))


def inputs(spans: list[Span], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    rows, context = spans[-1].end, rows_of(spans).stop
    q, dout = (drawn(rows, HEADS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    k, v = (drawn(context, GROUPS, WIDTH, seed=seed, dtype=dtype) for seed in (3, 4))
    return q, k, v, dout


@pytest.mark.parametrize("keys_at_once", [2, 100])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_there_and_back_equal_one_masked_softmax(spans, keys_at_once, monkeypatch):
    monkeypatch.setattr("llmb.ops.attention.attention_block.PLAIN_SCORES", 64)  # so that blocks of rows are several
    q, k, v, dout = inputs(spans)
    out, lse = torch.empty_like(q), torch.empty(HEADS, len(q))
    attend(q, k, v, spans, SCALE, keys_at_once, into=(out, lse))
    wide = torch.full((len(q), HEADS + 3, WIDTH), 7.0)
    dk, dv = (drawn(*k.shape, seed=seed) for seed in (5, 6))
    before = dk.clone(), dv.clone()
    attend_backward(dout, q, k, v, out, lse, spans, wide[:, :HEADS], dk, dv, False, SCALE, keys_at_once)
    found = out, lse, wide[:, :HEADS], dk - before[0], dv - before[1]
    wanted = by_autograd(q, k, v, spans, dout)
    for name, one, exact in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert bool((wide[:, HEADS:] == 7).all())


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_fresh_slopes_need_nothing_to_be_there(spans):
    q, k, v, dout = inputs(spans)
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, len(q)), torch.empty_like(q)
    attend(q, k, v, spans, SCALE, into=(out, lse))
    dk, dv = (torch.full_like(k, torch.nan) for _ in range(2))
    attend_backward(dout, q, k, v, out, lse, spans, dq, dk, dv, True, SCALE)
    wanted = by_autograd(q, k, v, spans, dout)
    torch.testing.assert_close((dk, dv), wanted[3:], rtol=1e-4, atol=1e-5)


def test_chunks_of_a_sequence_add_up_to_the_whole():
    whole = [Span(0, 20, 0, 0)]
    q, k, v, dout = inputs(whole)
    wanted = by_autograd(q, k, v, whole, dout)
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, 20), torch.empty_like(q)
    chunks = [
        (slice(0, 8), [Span(0, 8, 0, 0)]),
        (slice(8, 11), [Span(0, 3, 0, 8)]),
        (slice(11, 20), [Span(0, 9, 0, 11)]),
    ]
    for rows, spans in chunks:
        attend(q[rows], k[: rows.stop], v[: rows.stop], spans, SCALE, into=(out[rows], lse[:, rows]))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for rows, spans in reversed(chunks):
        attend_backward(
            dout[rows], q[rows], k, v, out[rows], lse[:, rows], spans, dq[rows], dk, dv, rows.stop == 20, SCALE
        )
    torch.testing.assert_close((out, lse, dq, dk, dv), wanted, rtol=1e-4, atol=1e-5)


def test_bf16_is_close_and_slopes_of_keys_may_be_fp32():
    spans = SPANS["packed, the first from earlier"]
    q, k, v, dout = inputs(spans, torch.bfloat16)
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, len(q)), torch.empty_like(q)
    attend(q, k, v, spans, SCALE, into=(out, lse))
    dk, dv = (torch.zeros(k.shape) for _ in range(2))
    attend_backward(dout, q, k, v, out, lse, spans, dq, dk, dv, False, SCALE)
    wanted = by_autograd(*(x.float() for x in (q, k, v)), spans, dout.float())
    for one, exact in zip((out, lse, dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(one.float(), exact, rtol=2e-2, atol=2e-2)


def test_spans_that_do_not_tile_their_chunk_are_refused():
    with pytest.raises(AssertionError, match="spans tile"):
        rows_of([Span(0, 3, 0, 0), Span(4, 6, 4, 4)])
    with pytest.raises(AssertionError, match="one piece"):
        rows_of([Span(0, 3, 0, 0), Span(3, 6, 4, 4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "width"), [(13, 6, 16), (8, 4, 24)])
def test_the_merging_kernel_equals_plain_torch(rows, heads, width, dtype, device):
    from llmb.ops.attention.merge_lse_triton import merge_triton_

    wide = drawn(rows + 2, heads + 1, width, seed=1, dtype=dtype).to(device)
    lses = drawn(heads, rows + 5, seed=2).to(device) * 3
    other = drawn(rows, heads, width, seed=3, dtype=dtype).to(device)
    other_lse = drawn(heads, rows, seed=4).to(device) * 3
    found, wanted = (wide.clone(), lses.clone()), (wide.clone(), lses.clone())
    for merge, (out, lse) in ((merge_triton_, found), (merge_reference_, wanted)):
        merge(out[1:-1, :heads], lse[:, 2:-3], other, other_lse)
    torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_merging_with_what_weighs_nothing_changes_nothing():
    out, lse = drawn(3, HEADS, WIDTH), drawn(HEADS, 3)
    merged, merged_lse = out.clone(), lse.clone()
    merge_(merged, merged_lse, drawn(3, HEADS, WIDTH, seed=1) * 1e6, lse - 200)
    torch.testing.assert_close((merged, merged_lse), (out, lse))


@pytest.mark.parametrize("kernel", [CUDNN, FLASH], ids=["cudnn", "flash"])
@pytest.mark.parametrize("name", ["a whole sequence", "a later part of one", "three of one length"])
def test_calls_of_gpu_kernels_fit_the_installed_torch(name, kernel, monkeypatch):
    """Without values: names and orders of arguments, shapes and layouts, by torch's own description of its kernels."""
    spans = SPANS[name]
    monkeypatch.setattr(segment_attention, "kernel_for", lambda *_: kernel)
    q, k, v, dout = (x.to("meta") for x in inputs(spans, torch.bfloat16))
    lengths, own = segment_attention._lengths(spans), rows_of(spans)
    out, lse = kernel.forward(q, k[own], v[own], lengths, True, SCALE)
    assert out.is_contiguous()
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (HEADS, len(q)), torch.float32)
    slopes = kernel.backward(dout, q, k[own], v[own], out, lse, lengths, True, SCALE)
    assert [x.shape for x in slopes] == [q.shape, k[own].shape, v[own].shape]
    assert all(x.is_contiguous() for x in slopes)
    attend(q, k, v, spans, SCALE, into=(out, lse))
    attend_backward(dout, q, k, v, out, lse, spans, torch.empty_like(q), k.float(), v.float(), True, SCALE)


def test_only_sizes_that_recur_are_left_to_cudnn(monkeypatch):
    monkeypatch.setattr(segment_attention, "_has_fast_cudnn", lambda _device: True)

    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, None

        def __init__(self, width: int):
            self.shape = (1, 1, width)

    def chosen(spans, width=128):
        return segment_attention.kernel_for(OnGpu(width), spans)

    assert chosen([Span(0, 8192, 0, 0), Span(8192, 16384, 8192, 8192)]) is CUDNN
    assert chosen([Span(0, 16384, 0, 49152)]) is CUDNN
    assert chosen([Span(0, 16384, 0, 49152)], width=192) is FLASH
    assert chosen([Span(0, 16384, 0, 49152)], width=12) is PLAIN
    assert chosen([Span(0, 16384, 0, 49151)]) is FLASH
    assert chosen([Span(0, 300, 0, 0), Span(300, 16384, 300, 300)]) is FLASH
