"""fp8 weights of a layer: cast on request, again when they may have changed; and the linears that use them."""

from dataclasses import replace

import pytest
import torch
from small_models import llama_model
from torch import Tensor

from llmb.errors import ConfigError
from llmb.models.llama_layer import fp8_layer_weights as fp8_weights_module
from llmb.models.llama_layer.fp8_layer_weights import MATRICES, Fp8LayerWeights
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer_recipes import LAYER_RECIPES, Fp8ModelWeights
from llmb.models.llama_layer.layer_tensors import LayerWeights, SavedActivations
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import layer_weights_view
from llmb.ops.gemm.scaled_matmul import scaled_matmul
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS
from llmb.perfmodel.offload.buffers import ParamBuckets

CPU = torch.device("cpu")
MODEL = llama_model()
BF16 = torch.bfloat16


def random_weights(seed: int) -> LayerWeights:
    numbers = torch.randn(ParamBuckets(MODEL).bucket_numel, generator=torch.Generator().manual_seed(seed))
    return layer_weights_view((0.2 * numbers).to(BF16), MODEL)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def count_casts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an entry for each pass over a matrix: whether it wrote anything."""
    casts: list[bool] = []
    quantize_fp8 = fp8_weights_module.quantize_fp8

    def counted(x, scale_amax, rows=None, columns=None):
        casts.append(rows is not None or columns is not None)
        quantize_fp8(x, scale_amax, rows, columns)

    monkeypatch.setattr(fp8_weights_module, "quantize_fp8", counted)
    return casts


@pytest.mark.parametrize("name", MATRICES)
def test_both_layouts_hold_the_quantized_matrix(name: str) -> None:
    weights = random_weights(1)
    layer = Fp8ModelWeights(MODEL, CPU).layer(0, "forward", weights)
    plain, rows, columns = weights[MATRICES.index(name)], layer.rows(name), layer.columns(name)
    assert torch.equal(rows.rows.float(), columns.columns.float().T)
    assert relative_error(rows.rows.float() * rows.scale, plain) < 0.04


def test_matrix_is_cast_once_for_all_chunks_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_weights, weights, casts = Fp8ModelWeights(MODEL, CPU), random_weights(1), count_casts(monkeypatch)
    for _chunk in range(3):
        fp8_weights.layer(0, "forward", weights).rows("w2")
    assert casts == [False, True]
    for _chunk in range(3):
        layer = fp8_weights.layer(0, "backward", weights)
        layer.rows("w2")
        layer.columns("w2")
    assert casts == [False, True, True, True]
    fp8_weights.scales.update()
    fp8_weights.layer(0, "forward", weights).rows("w2")
    assert casts == [False, True, True, True, True]


def test_each_layer_and_step_has_its_own_values() -> None:
    fp8_weights = Fp8ModelWeights(MODEL, CPU)

    def value(layer: int, pass_name: fp8_weights_module.PassName, weights: LayerWeights) -> Tensor:
        matrix = fp8_weights.layer(layer, pass_name, weights).rows("w2")
        return matrix.rows.float() * matrix.scale

    weights, next_weights = random_weights(1), random_weights(2)
    assert relative_error(value(0, "forward", weights), weights.w2_CF) < 0.04
    assert relative_error(value(1, "forward", next_weights), next_weights.w2_CF) < 0.04
    assert relative_error(value(0, "backward", weights), weights.w2_CF) < 0.04
    weights.w2_CF.mul_(1.5)  # an update, and less growth than the margin
    fp8_weights.scales.update()
    assert relative_error(value(0, "forward", weights), weights.w2_CF) < 0.04


def test_weights_may_move_between_chunks() -> None:
    fp8_weights, weights = Fp8ModelWeights(MODEL, CPU), random_weights(1)
    copy = LayerWeights(*(weight.clone() for weight in weights if weight is not None))
    fp8_weights.layer(0, "backward", weights).columns("w2")
    for weight in (*weights.matrices, weights.norm1_C, weights.norm2_C):
        weight.fill_(torch.nan)
    layer = fp8_weights.layer(0, "backward", copy)
    assert relative_error(layer.rows("w2").rows.float() * layer.rows("w2").scale, copy.w2_CF) < 0.04
    assert layer.norm1_C is copy.norm1_C
    assert layer.norm2_C is copy.norm2_C


def test_unsupported_widths_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"multiples of 16: of small ffn is 40, kv_heads \* head_dim is 8; use dtype=bf16"
    ):
        Fp8ModelWeights(replace(MODEL, ffn=40, kv_heads=1), CPU)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_linears_with_many_scales_are_those_of_dequantized_operands(recipe: str) -> None:
    """Forward, and all gradients of the down projection, of operands that were rounded beforehand."""
    tokens, model = 40, llama_model(hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=64)
    numbers = 0.2 * torch.randn(ParamBuckets(model).bucket_numel, generator=torch.Generator().manual_seed(5))
    weights = layer_weights_view(numbers.to(BF16), model)
    layer = Fp8ModelWeights(model, CPU, recipe).layer(0, "backward", weights)
    linears = LAYER_RECIPES[recipe].linears(model, layer)

    def rounded(x: Tensor, weight: bool = False) -> tuple[Tensor, Tensor]:
        """Rows, and columns transposed."""
        scales = VECTOR_SCALINGS[recipe]()
        out = scales.empty(*x.shape, CPU, rows=True, columns=True, weight=weight)
        scales.quantize_(x, out, weight=weight)
        unit = torch.eye(x.shape[1]), torch.eye(out.columns.shape[1])
        rows, columns = (
            scaled_matmul(operand, (eye.to(E4M3), group_ones(recipe, len(eye))), torch.empty(len(operand[0]), len(eye)))
            for operand, eye in zip(((out.rows, out.row_scales), (out.columns, out.column_scales)), unit, strict=True)
        )
        return rows, columns.T[: len(x)]

    attn, residual = randn(tokens, 256, seed=3), randn(tokens, 128, seed=4)
    out = torch.empty(tokens, 128, dtype=BF16)
    linears.o_proj(attn, residual, out, None)
    weight = rounded(weights.wo_CA, weight=True)
    expected = (rounded(attn)[0] @ weight[0].T).to(BF16) + residual
    assert relative_error(out, expected) < 0.002
    grads = layer_weights_view(torch.zeros(ParamBuckets(model).bucket_numel), model)
    dx, saved = torch.empty(tokens, 256, dtype=BF16), SavedActivations(attn, residual, attn)
    for count, accumulate in ((1, False), (2, True)):
        linears.o_proj_backward(grads, accumulate, attn, saved, residual, dx)
        dy = rounded(residual)
        assert relative_error(dx, dy[0] @ weight[1]) < 0.002
        assert relative_error(grads.wo_CA, count * (dy[1].T @ rounded(attn)[1])) < 1e-5


def group_ones(recipe: str, n: int) -> Tensor:
    """Scales of an identity matrix that is quantized as it is."""
    return torch.ones(n, 1) if recipe == "rowwise" else torch.ones(n // 128, n).T


@pytest.mark.parametrize("tokens", [16, 21])
def test_fp8_linears_are_as_close_to_plain_ones_as_their_rounding_allows(tokens: int) -> None:
    m, weights = MODEL, random_weights(1)
    fp8: Fp8LayerWeights = Fp8ModelWeights(m, CPU).layer(0, "forward", weights)
    x, attn, gate_up = randn(tokens, 32, seed=2), randn(tokens, 32, seed=3), randn(tokens, 96, seed=4)
    results: dict[str, list[Tensor]] = {}
    for name, linears in (("plain", PlainLinears(m, weights)), ("fp8", Fp8Linears(m, fp8))):
        qkv = [torch.empty(tokens, width, dtype=BF16) for width in (32, 16, 16)]
        residual, pair, out = (torch.empty(tokens, width, dtype=BF16) for width in (32, 96, 32))
        linears.qkv_proj(x, qkv)
        linears.o_proj(attn, x, residual, None)
        linears.gate_up_proj(attn, pair)
        linears.gate_up_proj(attn, repeated := torch.empty_like(pair))  # with a known scale
        assert torch.equal(pair, repeated)
        linears.down_proj(gate_up.clone(), x, out, None)
        in_place = x.clone()
        linears.down_proj(gate_up.clone(), in_place, in_place, SavedActivations(x, x, gate_up))
        assert torch.equal(out, in_place)
        results[name] = [*qkv, residual - x, pair, out - x]
    for fp8_out, plain in zip(results["fp8"], results["plain"], strict=True):
        assert 0.003 < relative_error(fp8_out, plain) < 0.06
