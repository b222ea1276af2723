"""FP8 grouped GEMM: the layout of groups, quantization of rows and columns, the three GEMMs and the weight cache."""

import gc
import math
from itertools import pairwise

import pytest
import torch
from seeded_tensors import relative_error
from torch import Tensor

import llmb.ops.moe.fp8_grouped_gemm as fp8_grouped_gemm_module
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_gemm, fp8_grouped_gemm_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import fake_quantize
from llmb.ops.quant.group_quant import (
    Fp8WeightCache,
    group_offsets,
    padded_columns,
    quantize_expert_weights,
    quantize_groups,
    weight_group_offsets,
)

SIZES = [[16, 32, 16], [1, 0, 40, 23], [0, 0, 5], [64], [300, 0, 1, 129, 128, 127]]
INPUTS, OUTPUTS = 48, 80
HALF_STEP = 2.0**-4  # of e4m3, relative


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def operands(sizes: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and gradients; magnitudes of rows differ by powers of ten, as those of gradients do."""
    generator = torch.Generator().manual_seed(sum(sizes) + len(sizes))
    rows, groups = sum(sizes), len(sizes)
    x = torch.randn(rows, INPUTS, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    weight = torch.randn(groups, OUTPUTS, INPUTS, generator=generator) * 0.02
    grad = torch.randn(rows, OUTPUTS, generator=generator) * 1e-6 * 10 ** torch.randn(rows, 1, generator=generator)
    return x.to(dtype).requires_grad_(), weight.requires_grad_(), grad.to(dtype)


def results(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    out = fp8_grouped_gemm(x, weight, ends, **options)
    return out, *torch.autograd.grad(out, (x, weight), grad)


@pytest.mark.parametrize("sizes", [*SIZES, [7] * 40], ids=str)
def test_group_offsets_cover_every_row_once(sizes: list[int]) -> None:
    groups = group_offsets(ends_of(sizes), sum(sizes))
    padded_ends = groups.padded_ends_E.tolist()
    assert groups.padded_ends_E.dtype == torch.int32
    assert [end - start for start, end in pairwise([0, *padded_ends])] == [
        max(-(-size // 16) * 16, 16) for size in sizes
    ]
    assert padded_ends[-1] <= padded_columns(sum(sizes), len(sizes))
    rows, padded_rows = [], []
    for group, first, end, padded_row, stop in groups.tiles_5T.T.tolist():
        rows += [(group, row) for row in range(first, min(end, first + 128))]
        padded_rows += range(padded_row, min(stop, padded_row + 128))
        assert padded_row % 16 == 0
        if padded_row < stop:
            assert padded_row - (padded_ends[group - 1] if group else 0) == first - sum(sizes[:group])
    assert rows == [(group, sum(sizes[:group]) + row) for group, size in enumerate(sizes) for row in range(size)]
    assert padded_rows == list(range(padded_ends[-1]))


def test_group_offsets_on_the_meta_device() -> None:
    """Nothing is read on the host: meta tensors have no values."""
    groups = group_offsets(torch.empty(8, dtype=torch.int32, device="meta"), 1000)
    assert groups.tiles_5T.shape == (5, 1000 // 128 + 8)
    assert weight_group_offsets(torch.empty(4, 32, 16, device="meta")).tiles_5T.shape[0] == 5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_columns_are_transposed_groups_padded_with_zeros(sizes: list[int]) -> None:
    x, _, _ = operands(sizes)
    groups = group_offsets(ends_of(sizes), sum(sizes))
    quantized = quantize_groups(x.detach(), groups, rows=True, columns=True)
    assert torch.equal(quantized.rows.float(), fake_quantize(x.detach(), E4M3, dim=1)[0])
    starts = zip([0, *groups.ends_E.tolist()], [0, *groups.padded_ends_E.tolist()], strict=True)
    for group, ((row, padded_row), size) in enumerate(zip(starts, [*sizes, 0], strict=True)):
        if size:
            values, scale = fake_quantize(x.detach()[row : row + size], E4M3, dim=0)
            assert torch.equal(quantized.columns[:, padded_row : padded_row + size].float(), values.T)
            assert torch.equal(quantized.column_scales[group], scale[0])
    for (_, end), size in zip(pairwise([0, *groups.padded_ends_E.tolist()]), sizes, strict=True):
        padding = -size % 16 or (0 if size else 16)
        assert (quantized.columns[:, end - padding : end].float() == 0).all()


def test_columns_of_expert_weights_are_per_matrix() -> None:
    _, weight, _ = operands([1, 1, 1])
    quantized = quantize_expert_weights(weight.detach(), rows=True, columns=True)
    assert torch.equal(quantized.rows.view(weight.shape).float(), fake_quantize(weight.detach(), E4M3, dim=2)[0])
    assert torch.equal(quantized.columns.transpose(1, 2).float(), fake_quantize(weight.detach(), E4M3, dim=1)[0])
    assert torch.equal(quantized.column_scales, fake_quantize(weight.detach(), E4M3, dim=1)[1][:, 0])
    for layout in ("rows", "columns"):
        alone = quantize_expert_weights(weight.detach(), **{layout: True})
        assert torch.equal(getattr(alone, layout).view(torch.uint8), getattr(quantized, layout).view(torch.uint8))
        assert sum(tensor is None for tensor in alone) == 2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gemms_match_the_reference(sizes: list[int], dtype: torch.dtype) -> None:
    x, weight, grad = operands(sizes, dtype)
    actual = results(x, weight, ends_of(sizes), grad)
    expected = fp8_grouped_gemm_reference(x.detach(), weight.detach(), ends_of(sizes), grad)
    assert [tensor.dtype for tensor in actual] == [dtype, dtype, torch.float32]
    for name, tensor, exact in zip(("out", "grad of x", "grad of weight"), actual, expected, strict=True):
        # The same summands in another order, then rounded to bf16: at most one step apart.
        assert torch.allclose(tensor, exact, rtol=2**-7, atol=1e-6 * exact.abs().max().item()), name
    assert [(tensor == 0).all().item() for tensor in actual[2]] == [size == 0 for size in sizes]


@pytest.mark.parametrize("sizes", [[64], [300, 0, 1, 129, 128, 127]], ids=str)
def test_error_is_that_of_quantized_operands(sizes: list[int]) -> None:
    """Two e4m3 operands, each with a uniform error of at most half a step: variance a third of its square."""
    x, weight, grad = operands(sizes)
    exact = [x.float(), weight, grad.float()]
    groups = [slice(*group) for group in pairwise([0, *ends_of(sizes).tolist()])]
    exact_results = (
        torch.cat([exact[0][rows] @ matrix.T for rows, matrix in zip(groups, weight, strict=True)]),
        torch.cat([exact[2][rows] @ matrix for rows, matrix in zip(groups, weight, strict=True)]),
        torch.stack([exact[2][rows].T @ exact[0][rows] for rows in groups]),
    )
    for tensor, exact in zip(results(x, weight, ends_of(sizes), grad), exact_results, strict=True):
        assert 0.002 < relative_error(tensor, exact.detach()) < math.hypot(HALF_STEP, HALF_STEP) / math.sqrt(3)


def test_small_rows_and_channels_are_as_exact_as_large_ones() -> None:
    """A per-tensor scale would lose a millionth of the largest."""
    x, weight, grad = operands([48, 16])
    shrunk = x.detach().clone()
    shrunk[5] *= 2.0**-30
    scaled = grad.clone()
    scaled[:, 7] *= 2.0**-30
    unscaled = results(x, weight, ends_of([48, 16]), grad)
    actual = results(shrunk.requires_grad_(), weight, ends_of([48, 16]), scaled)
    assert torch.equal(actual[0][5], unscaled[0][5] * 2.0**-30)
    grad_weight = results(shrunk, weight, ends_of([48, 16]), grad)[2]
    assert torch.equal(actual[2][:, 7], grad_weight[:, 7] * 2.0**-30)


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e30])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_zeros_and_large_magnitudes(magnitude: float, where: int) -> None:
    tensors = list(operands([20, 44]))
    tensors[where].data.mul_(0.0 if magnitude == 0 else magnitude / tensors[where].abs().max().item())
    x, weight, grad = tensors
    actual = results(x, weight, ends_of([20, 44]), grad)
    assert all(torch.isfinite(tensor).all() for tensor in actual)
    if magnitude == 0 and where < 2:
        assert (actual[0] == 0).all()


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_propagate(nonfinite: float) -> None:
    x, weight, grad = operands([20, 44])
    x.data[3, 5] = nonfinite
    quantized = quantize_groups(x.detach(), group_offsets(ends_of([20, 44]), 64), rows=True, columns=True)
    assert (~quantized.row_scales.isfinite()).nonzero().tolist() == [[3]]
    assert (~quantized.column_scales.isfinite()).nonzero().tolist() == [[0, 5]]
    out, _, grad_weight = results(x, weight, ends_of([20, 44]), grad)
    assert out[3].isnan().all()
    assert out.isnan().sum() == OUTPUTS
    assert grad_weight[0, :, 5].isnan().all()
    assert grad_weight.isnan().sum() == OUTPUTS


def test_padding_after_the_last_group_is_ignored() -> None:
    x, weight, grad = operands([20, 0, 44])
    nan = torch.full((70, 1), math.nan, dtype=x.dtype)
    padded_x = torch.cat((x.detach(), nan.expand(-1, INPUTS))).requires_grad_()
    padded_grad = torch.cat((grad, nan.expand(-1, OUTPUTS)))
    y, dx, dw = results(x, weight, ends_of([20, 0, 44]), grad)
    padded_y, padded_dx, padded_dw = results(padded_x, weight, ends_of([20, 0, 44]), padded_grad)
    assert torch.equal(padded_y[:64], y)
    assert torch.equal(padded_dx[:64], dx)
    assert torch.equal(padded_dw, dw)


def test_gradient_of_one_operand_only() -> None:
    x, weight, grad = operands([20, 44])
    expected = results(x, weight, ends_of([20, 44]), grad)
    for leaf, index in ((x, 1), (weight, 2)):
        frozen = weight if leaf is x else x
        frozen.requires_grad_(False)
        out = fp8_grouped_gemm(x, weight, ends_of([20, 44]))
        assert torch.equal(torch.autograd.grad(out, leaf, grad)[0], expected[index])
        frozen.requires_grad_(True)


def test_rows_are_quantized_once_for_gate_and_up(monkeypatch) -> None:
    casts = []
    original = fp8_grouped_gemm_module.quantize_groups
    monkeypatch.setattr(
        fp8_grouped_gemm_module,
        "quantize_groups",
        lambda *args, **kwargs: (casts.append(kwargs), original(*args, **kwargs))[1],
    )
    x, weight, _ = operands([20, 44])
    ends = ends_of([20, 44])
    first = fp8_grouped_gemm(x, weight, ends)
    assert torch.equal(fp8_grouped_gemm(x, weight, ends), first)
    assert len(casts) == 1
    fp8_grouped_gemm(x, weight, ends.clone())
    x.data = x.data.clone()
    with torch.no_grad():
        x.mul_(2)
    assert torch.equal(fp8_grouped_gemm(x, weight, ends), first * 2)
    assert len(casts) == 3


def test_offsets_are_computed_once_for_the_layers_of_the_same_experts(monkeypatch) -> None:
    computed = []
    monkeypatch.setattr(
        fp8_grouped_gemm_module, "group_offsets", lambda *args: (computed.append(args[1]), group_offsets(*args))[1]
    )
    x, weight, _ = operands([20, 44])
    ends = ends_of([20, 44])
    for rows in (x, x.detach().clone()):
        fp8_grouped_gemm(rows, weight, ends)
    assert computed == [64]
    ends.copy_(ends_of([44, 20]))
    changed = fp8_grouped_gemm(x.detach().clone(), weight, ends)
    assert computed == [64, 64]
    assert torch.equal(changed, fp8_grouped_gemm(x.detach().clone(), weight, ends_of([44, 20])))
    del ends, changed, rows, x
    gc.collect()
    assert not fp8_grouped_gemm_module._offsets


def test_weight_cache_is_refreshed_only_when_the_weight_changes(monkeypatch) -> None:
    from llmb.ops.quant import group_quant

    casts = []
    original = group_quant.quantize_groups_
    monkeypatch.setattr(group_quant, "quantize_groups_", lambda *args: (casts.append(args[0]), original(*args))[1])
    x, weight, grad = operands([20, 44])
    ends, weight_cache = ends_of([20, 44]), Fp8WeightCache()

    def weight_casts() -> int:
        return sum(len(tensor) == weight.shape[:2].numel() for tensor in casts)

    for _ in range(2):  # two micro-batches
        for tensor, exact in zip(
            results(x, weight, ends, grad, weight_cache=weight_cache), results(x, weight, ends, grad), strict=True
        ):
            assert torch.equal(tensor, exact)
    assert weight_casts() == 1 + 2 * 2  # the others cast in each pass
    memory = weight_cache.get(weight, x.dtype).columns.data_ptr()
    with torch.no_grad():
        weight.neg_()
    out = fp8_grouped_gemm(x, weight, ends, weight_cache=weight_cache)
    assert torch.equal(out, fp8_grouped_gemm(x, weight, ends))
    weight.data.neg_()  # as a kernel outside of torch would
    assert torch.equal(fp8_grouped_gemm(x, weight, ends, weight_cache=weight_cache), out)
    torch.autograd.graph.increment_version(weight)
    assert torch.equal(fp8_grouped_gemm(x, weight, ends, weight_cache=weight_cache), -out)
    assert weight_cache.get(weight, x.dtype).columns.data_ptr() == memory, "at the same address"
