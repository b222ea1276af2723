"""A layer's weights in 8 bits: made when asked for, made again when they may have changed; and the layers they make."""

from dataclasses import replace

import pytest
import torch
from small_llama import MODEL
from torch import Tensor

from llmb.errors import ConfigError
from llmb.models.llama_layer import fp8_layer_weights as fp8_weights_module
from llmb.models.llama_layer.fp8_layer_weights import MATRICES, Fp8Layer, Fp8Weights
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer_tensors import BlockWeights
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import block_weights
from llmb.perfmodel.offload.buffers import Units

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def drawn_weights(seed: int) -> BlockWeights:
    numbers = torch.randn(Units(MODEL).block_numbers, generator=torch.Generator().manual_seed(seed))
    return block_weights((0.2 * numbers).to(BF16), MODEL)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def away(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def casts_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled with a word for each pass over a matrix: whether it wrote anything."""
    made: list[bool] = []
    cast = fp8_weights_module.cast_both

    def counted(x, gauge, rows=None, columns=None):
        made.append(rows is not None or columns is not None)
        cast(x, gauge, rows, columns)

    monkeypatch.setattr(fp8_weights_module, "cast_both", counted)
    return made


@pytest.mark.parametrize("name", MATRICES)
def test_both_forms_are_the_matrix_within_its_rounding(name: str) -> None:
    weights = drawn_weights(1)
    layer = Fp8Weights(MODEL, CPU).of(0, "forward", weights)
    plain, rows, columns = weights[MATRICES.index(name)], layer.rows(name), layer.columns(name)
    assert torch.equal(rows.rows.float(), columns.columns.float().T)
    assert away(rows.rows.float() * rows.scale, plain) < 0.04


def test_a_matrix_is_cast_once_for_all_chunks_and_looked_at_once_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_weights, weights, made = Fp8Weights(MODEL, CPU), drawn_weights(1), casts_of(monkeypatch)
    for _chunk in range(3):
        fp8_weights.of(0, "forward", weights).rows("w2")
    assert made == [False, True]
    for _chunk in range(3):
        layer = fp8_weights.of(0, "backward", weights)
        layer.rows("w2")
        layer.columns("w2")
    assert made == [False, True, True, True]
    fp8_weights.scales.roll()
    fp8_weights.of(0, "forward", weights).rows("w2")
    assert made == [False, True, True, True, True]


def test_the_next_layer_and_the_next_step_have_their_own_values() -> None:
    fp8_weights = Fp8Weights(MODEL, CPU)

    def value(layer: int, way: fp8_weights_module.Way, weights: BlockWeights) -> Tensor:
        made = fp8_weights.of(layer, way, weights).rows("w2")
        return made.rows.float() * made.scale

    weights, others = drawn_weights(1), drawn_weights(2)
    assert away(value(0, "forward", weights), weights.w2_CF) < 0.04
    assert away(value(1, "forward", others), others.w2_CF) < 0.04
    assert away(value(0, "backward", weights), weights.w2_CF) < 0.04
    weights.w2_CF.mul_(1.5)  # an update, and less growth than the margin
    fp8_weights.scales.roll()
    assert away(value(0, "forward", weights), weights.w2_CF) < 0.04


def test_weights_may_lie_elsewhere_when_the_next_chunk_comes() -> None:
    fp8_weights, weights = Fp8Weights(MODEL, CPU), drawn_weights(1)
    copy = BlockWeights(*(one.clone() for one in weights))
    fp8_weights.of(0, "backward", weights).columns("w2")
    for one in weights:
        one.fill_(torch.nan)
    layer = fp8_weights.of(0, "backward", copy)
    assert away(layer.rows("w2").rows.float() * layer.rows("w2").scale, copy.w2_CF) < 0.04
    assert layer.norm1_C is copy.norm1_C
    assert layer.norm2_C is copy.norm2_C


def test_widths_that_products_cannot_take_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"multiples of 16: of small ffn is 40, kv_heads \* head_dim is 8; use dtype=bf16"
    ):
        Fp8Weights(replace(MODEL, ffn=40, kv_heads=1), CPU)


@pytest.mark.parametrize("tokens", [16, 21])
def test_layers_are_as_close_to_plain_ones_as_their_rounding_allows(tokens: int) -> None:
    m, weights = MODEL, drawn_weights(1)
    fp8: Fp8Layer = Fp8Weights(m, CPU).of(0, "forward", weights)
    inp, attn, h13 = drawn(tokens, 32, seed=2), drawn(tokens, 32, seed=3), drawn(tokens, 96, seed=4)
    found: dict[str, list[Tensor]] = {}
    for name, linears in (("plain", PlainLinears(m, weights)), ("fp8", Fp8Linears(m, fp8))):
        qkv = [torch.empty(tokens, width, dtype=BF16) for width in (32, 16, 16)]
        resid, both, out = (torch.empty(tokens, width, dtype=BF16) for width in (32, 96, 32))
        linears.project(inp, qkv)
        linears.output(attn, inp, resid)
        linears.gate_and_up(attn, both)
        linears.gate_and_up(attn, again := torch.empty_like(both))  # with a scale that is known
        assert torch.equal(both, again)
        linears.down(h13.clone(), inp, out, keep=False)
        over = inp.clone()
        linears.down(h13.clone(), over, over, keep=True)
        assert torch.equal(out, over)
        found[name] = [*qkv, resid - inp, both, out - inp]
    for one, plain in zip(found["fp8"], found["plain"], strict=True):
        assert 0.003 < away(one, plain) < 0.06
