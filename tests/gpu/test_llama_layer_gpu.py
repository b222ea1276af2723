"""Llama layers with explicit backward on a GPU: attention kernels, whole chunks, memory, no synchronization."""

from typing import Any

import pytest
import torch
from cuda_checks import GPU, HOPPER, NEEDS_FLASH4, NEEDS_GPU, no_synchronization, peak_allocated, randn, relative_error
from small_models import llama_model
from torch import Tensor

from llmb.models.blocks import rope_table
from llmb.models.llama_layer.fp8_layer_weights import PassName, QuantizedLayerWeights
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.layer_recipes import LAYER_RECIPES, Fp8ModelWeights
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights, SavedActivations
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import layer_weights_view
from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import CUDNN, FLASH, PLAIN, AttentionBlock, AttentionKernel
from llmb.ops.attention.flash_attention_4 import FLASH4, takes_softcap_backward
from llmb.ops.attention.segment_attention import (
    KEY_BLOCK,
    Segment,
    chunk_rows,
    chunk_segments,
    kernel_for,
    segment_attention_backward,
    segment_attention_forward,
)
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.workspace import (
    backward_elements,
    forward_elements,
    fp8_backward_bytes,
    fp8_forward_bytes,
)

pytestmark = NEEDS_GPU

HEADS, GROUPS, WIDTH, SCALE = 8, 2, 128, 128**-0.5
SEGMENTS = {
    "a whole sequence": [Segment(0, 1024, 0, 0)],
    "a later chunk": [Segment(0, 512, 0, 1024)],
    "four of equal length": [Segment(first, first + 256, first, first) for first in range(0, 1024, 256)],
    "packed": chunk_segments([0, 700, 800, 803], 512, 1536),
}
KERNELS = [
    pytest.param(CUDNN, marks=HOPPER, id="cudnn"),
    pytest.param(FLASH, id="flash"),
    pytest.param(FLASH4, marks=NEEDS_FLASH4, id="flash4"),
]
OFFLOAD_RECIPES = ("tensorwise_delayed", "rowwise", "blockwise")
WIDE = llama_model(name="wide", layers=1, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=512)


def random_inputs(segments: list[Segment], width: int = WIDTH) -> tuple[Tensor, ...]:
    rows, context = segments[-1].end, chunk_rows(segments).stop
    q, dout = (randn(rows, HEADS, width, seed=seed) for seed in (1, 2))
    return q, *(randn(context, GROUPS, width, seed=seed) for seed in (3, 4)), dout


def forward_and_backward(
    segments: list[Segment], tensors: tuple[Tensor, ...], key_block: int, window: int | None
) -> list[Tensor]:
    """Return output and gradients; the chunk is the end of its context, as out of core."""
    q, k, v, dout = tensors
    out, lse, dq = torch.empty_like(q), torch.empty(HEADS, len(q), device=GPU), torch.empty_like(q)
    dk, dv = (torch.full(k.shape, torch.nan, device=GPU) for _ in range(2))
    before = chunk_rows(segments).start
    kv, dkv = ((x[before:], y[before:], x[:before], y[:before]) for x, y in ((k, v), (dk, dv)))
    segment_attention_forward(q, *kv, segments, SCALE, key_block, out=(out, lse), window=window)
    segment_attention_backward(dout, q, *kv, out, lse, segments, dq, *dkv, False, SCALE, key_block, window)
    return [out, lse, dq, dk, dv]


@pytest.mark.parametrize(("key_block", "window"), [(256, None), (KEY_BLOCK, None), (KEY_BLOCK, 300)])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_selected_kernel_matches_the_plain_one(segments, key_block, window):
    tensors = random_inputs(segments)
    assert kernel_for(tensors[0], segments, window) in ((CUDNN, FLASH) if window is None else (FLASH,))
    assert_equals_plain(segments, tensors, key_block, window)


@NEEDS_FLASH4
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_flash_attention_4_matches_the_plain_kernel(segments, window, width, monkeypatch):
    """Whatever the length: packed sequences, rectangles of earlier keys, sliding windows, each width of heads."""
    choose = segment_attention.kernel_for
    monkeypatch.setattr(
        segment_attention,
        "kernel_for",
        lambda q, *arguments: FLASH4 if q.dtype == torch.bfloat16 else choose(q, *arguments),
    )
    assert_equals_plain(segments, random_inputs(segments, width), KEY_BLOCK, window)


@NEEDS_FLASH4
@pytest.mark.parametrize("window", [None, 1000])
def test_softcap_backward_by_flash_attention_4_matches_the_plain_kernel(window):
    tensors = [randn(2048, heads, 256, seed=seed) for seed, heads in enumerate((HEADS, GROUPS, GROUPS, HEADS))]
    block = AttentionBlock(*tensors[:3], (2048,), True, SCALE, window, 50.0)
    assert takes_softcap_backward(block)
    exact_block = block._replace(q_NHD=tensors[0].float(), k_KGD=tensors[1].float(), v_KGD=tensors[2].float())
    kernel = kernel_for(tensors[0], [Segment(0, 2048, 0, 0)], window, 50.0)
    out, lse = kernel.forward(block)
    exact_out, exact_lse = PLAIN.forward(exact_block)
    exact = exact_out, exact_lse, *PLAIN.backward(tensors[3].float(), exact_block, exact_out, exact_lse)
    actual = out, lse, *kernel.backward(tensors[3], block, out, lse)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, strict=True):
        assert relative_error(x, y) < 0.01, name


def assert_equals_plain(
    segments: list[Segment], tensors: tuple[Tensor, ...], key_block: int, window: int | None
) -> None:
    actual = forward_and_backward(segments, tensors, key_block, window)
    expected = forward_and_backward(segments, tuple(x.float() for x in tensors), key_block, window)
    for name, x, exact in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        error = relative_error(x, exact)
        assert error < 0.01, f"{name}: relative error {error:.4f}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_lse_is_natural_and_plans_take_other_strides(kernel: AttentionKernel):
    """The same sizes twice, the second time as rows of a longer chunk, with a larger stride of the lse."""
    q, k, v, dout = random_inputs([Segment(0, 256, 0, 0)])
    block = AttentionBlock(q, k, v, (256,), True, SCALE)
    exact_block = block._replace(q_NHD=q.float(), k_KGD=k.float(), v_KGD=v.float())
    for rows in (256, 1024):
        lse = torch.empty(HEADS, rows, device=GPU)
        out, lse[:, :256] = kernel.forward(block)
        wide = PLAIN.forward(exact_block)
        torch.testing.assert_close(lse[:, :256], wide[1], rtol=1e-3, atol=1e-3)
        actual = kernel.backward(dout, block, out, lse[:, :256])
        exact = PLAIN.backward(dout.float(), exact_block, wide[0], wide[1])
        for a, b in zip(actual, exact, strict=True):
            assert relative_error(a, b) < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sequences", [1, 4])
def test_queries_keys_and_values_side_by_side_equal_separate_ones(kernel: AttentionKernel, sequences: int):
    """As the columns of one matrix, of which cuDNN may have another plan, to the rounding of bf16."""
    q, k, v, dout = random_inputs([Segment(0, 1024, 0, 0)])
    columns = torch.cat((q, k, v), dim=1).split((HEADS, GROUPS, GROUPS), dim=1)
    results = []
    for tensors in ((q, k, v), columns):
        block = AttentionBlock(*tensors, sequences * (1024 // sequences,), True, SCALE)
        out, lse = kernel.forward(block)
        results.append((out, lse, *kernel.backward(dout, block, out, lse)))
    for name, separate, merged in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert merged.is_contiguous(), name
        assert relative_error(merged, separate) < 0.005, name


def test_weight_gradient_accumulates_without_more_memory():
    dy, x, into = randn(4096, 1024), randn(4096, 4096, seed=1), torch.zeros(1024, 4096, device=GPU)
    LinearGemms().weight_gradient(dy, x, into, accumulate=False)
    assert peak_allocated(lambda: LinearGemms().weight_gradient(dy, x, into, accumulate=True)) == 0
    torch.testing.assert_close(into, 2 * (dy.float().T @ x.float()), rtol=1e-3, atol=0.05)


class OneLayer:
    """A chunk of one layer of an 8B model, after `past` tokens of its sequence."""

    def __init__(self, tokens: int, past: int, recipe: str | None = None):
        m, n = WIDE, tokens
        self.block = LlamaLayer(m, PlainLinears if recipe is None else LAYER_RECIPES[recipe].linears)
        self.fp8_weights = None if recipe is None else Fp8ModelWeights(m, GPU, recipe)
        self.weights = layer_weights_view(randn(ParamBuckets(m).bucket_numel) * 0.02, m)
        for norm in (self.weights.norm1_C, self.weights.norm2_C):
            norm.fill_(1)
        self.grads = layer_weights_view(torch.zeros(ParamBuckets(m).bucket_numel, device=GPU), m)
        self.inp, self.out, self.d_residual = randn(n, m.hidden, seed=1), randn(n, m.hidden), randn(n, m.hidden, seed=2)
        self.kv = KeyValues(randn(past + n, 1024, seed=3), randn(past + n, 1024, seed=4))
        self.dkv = KeyValues(*(torch.zeros(past + n, 1024, device=GPU) for _ in range(2)))
        self.attn = AttentionOutput(randn(n, 4096), torch.zeros(32, n, device=GPU))
        self.saved = SavedActivations(randn(n, 4096), randn(n, m.hidden), randn(n, 2 * m.ffn))
        self.segments = [Segment(0, n, 0, past)]
        self.tables = rope_table(m.rope, m.head_dim, torch.arange(past, past + n, device=GPU))

    def forward(self, save: bool = True) -> None:
        extra = (self.attn, self.saved) if save else ()
        weights = self.weights_for("forward")
        self.block.forward(weights, self.inp, self.kv, self.segments, *self.tables, self.out, *extra)

    def backward(self) -> None:
        self.block.backward(
            self.weights_for("backward"), self.grads, True, self.inp, self.kv, self.attn, self.saved, self.dkv, True,
            self.segments, *self.tables, self.d_residual,
        )  # fmt: skip

    def weights_for(self, pass_name: PassName) -> LayerWeights | QuantizedLayerWeights[Any]:
        return self.weights if self.fp8_weights is None else self.fp8_weights.layer(0, pass_name, self.weights)


@HOPPER
@pytest.mark.parametrize(
    ("past", "recipe"), [(0, None), (4096, None), (16384, None), *((0, recipe) for recipe in OFFLOAD_RECIPES)]
)
def test_peak_workspace_of_a_chunk_is_within_the_estimate(past, recipe):
    tokens, layer = 4096, OneLayer(4096, past, recipe)
    for call in (layer.forward, layer.backward):
        call()  # plans, compilations
    slack = 16 << 20  # rounding by the allocator, and partial sums of the norms' gradients
    keys = max(min(past, KEY_BLOCK), tokens) / tokens
    estimates = {  # a call; bytes per token in bf16, and in fp8
        "saved": (layer.forward, forward_elements(WIDE, True), fp8_forward_bytes(WIDE, True, recipe)),
        "not saved": (
            lambda: layer.forward(save=False), forward_elements(WIDE, False), fp8_forward_bytes(WIDE, False, recipe),
        ),
        "backward": (layer.backward, backward_elements(WIDE, keys), fp8_backward_bytes(WIDE, recipe)),
    }  # fmt: skip
    added = 2 * WIDE.hidden * WIDE.ffn * 4 if recipe in ("rowwise", "blockwise") else 0  # to a gradient in fp32
    for name, (call, elements, fp8_bytes) in estimates.items():
        size, counted = peak_allocated(call), max(2 * elements, fp8_bytes if recipe else 0)
        print(name, size / tokens, counted)
        assert size <= counted * tokens + slack + (added if name == "backward" else 0), name


@pytest.mark.parametrize("recipe", [None, *(pytest.param(recipe, marks=HOPPER) for recipe in OFFLOAD_RECIPES)])
def test_layer_never_synchronizes(recipe):
    layer = OneLayer(1024, 1024, recipe)
    for call in (layer.forward, layer.backward):
        call()
    torch.cuda.synchronize()
    with no_synchronization():
        if layer.fp8_weights is not None:
            layer.fp8_weights.scales.update()
        layer.forward()
        layer.forward(save=False)
        layer.backward()
