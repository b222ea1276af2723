"""Grouped products in 8 bits: the layout, the casts of both forms, the three products and what is kept of a weight."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.fp8_linear import rounded
from llmb.ops.moe import fp8_grouped_gemm
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_product, fp8_grouped_product_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.group_quant import (
    GroupForms,
    Groups,
    WeightForms,
    cast_groups_reference,
    groups_of,
    in_groups,
    matrices_of,
    places_of,
    weight_in_groups,
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


def results(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, **more) -> tuple[Tensor, Tensor, Tensor]:
    out = fp8_grouped_product(x, weight, ends, **more)
    return out, *torch.autograd.grad(out, (x, weight), grad)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("sizes", [*SIZES, [7] * 40], ids=str)
def test_every_row_has_a_place_and_every_tile_one_group(sizes: list[int]) -> None:
    groups = groups_of(ends_of(sizes), sum(sizes))
    places = groups.places_E.tolist()
    assert groups.places_E.dtype == torch.int32
    assert [end - start for start, end in pairwise([0, *places])] == [max(-(-size // 16) * 16, 16) for size in sizes]
    assert places[-1] <= places_of(sum(sizes), len(sizes))
    rows, taken = [], []
    for group, first, end, place, stop in groups.tiles_5T.T.tolist():
        rows += [(group, row) for row in range(first, min(end, first + 128))]
        taken += range(place, min(stop, place + 128))
        assert place % 16 == 0
        if place < stop:
            assert place - (places[group - 1] if group else 0) == first - sum(sizes[:group])
    assert rows == [(group, sum(sizes[:group]) + row) for group, size in enumerate(sizes) for row in range(size)]
    assert taken == list(range(places[-1]))


def test_the_layout_is_known_without_values() -> None:
    """Nothing is read on the host: tensors of the device meta have nothing to read."""
    groups = groups_of(torch.empty(8, dtype=torch.int32, device="meta"), 1000)
    assert groups.tiles_5T.shape == (5, 1000 // 128 + 8)
    assert matrices_of(torch.empty(4, 32, 16, device="meta")).tiles_5T.shape[0] == 5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_columns_are_rows_of_each_group_transposed_with_zeros_behind(sizes: list[int]) -> None:
    x, _, _ = operands(sizes)
    groups = groups_of(ends_of(sizes), sum(sizes))
    made = in_groups(x.detach(), groups, rows=True, columns=True)
    assert torch.equal(made.rows.float(), rounded(x.detach(), E4M3, dim=1)[0])
    starts = zip([0, *groups.ends_E.tolist()], [0, *groups.places_E.tolist()], strict=True)
    for group, ((row, place), size) in enumerate(zip(starts, [*sizes, 0], strict=True)):
        if size:
            values, scale = rounded(x.detach()[row : row + size], E4M3, dim=0)
            assert torch.equal(made.columns[:, place : place + size].float(), values.T)
            assert torch.equal(made.column_scales[group], scale[0])
    for (_, end), size in zip(pairwise([0, *groups.places_E.tolist()]), sizes, strict=True):
        padding = -size % 16 or (0 if size else 16)
        assert (made.columns[:, end - padding : end].float() == 0).all()


def test_a_weight_s_columns_lie_matrix_by_matrix() -> None:
    _, weight, _ = operands([1, 1, 1])
    made = weight_in_groups(weight.detach(), rows=True, columns=True)
    assert torch.equal(made.rows.view(weight.shape).float(), rounded(weight.detach(), E4M3, dim=2)[0])
    assert torch.equal(made.columns.transpose(1, 2).float(), rounded(weight.detach(), E4M3, dim=1)[0])
    assert torch.equal(made.column_scales, rounded(weight.detach(), E4M3, dim=1)[1][:, 0])
    for form in ("rows", "columns"):
        alone = weight_in_groups(weight.detach(), **{form: True})
        assert torch.equal(getattr(alone, form).view(torch.uint8), getattr(made, form).view(torch.uint8))
        assert sum(one is None for one in alone) == 2


def in_triton(x: Tensor, groups: Groups, like: GroupForms) -> GroupForms:
    from llmb.ops.quant.group_quant_triton import cast_groups_triton

    made = GroupForms(*(None if one is None else torch.full_like(one, 1.0) for one in like))
    cast_groups_triton(x, groups, made)
    return made


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_write_what_plain_torch_does(sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
    x, _, _ = (one.to(device) for one in operands(sizes, dtype))
    groups = groups_of(ends_of(sizes).to(device), sum(sizes))
    for forms in ({"rows": True, "columns": True}, {"rows": True}, {"columns": True}):
        with torch.no_grad():
            wanted = in_groups(x, groups, **forms)
            cast_groups_reference(x, groups, wanted)
            check_forms(in_triton(x, groups, wanted), wanted, groups.places_E[-1].item())


def test_the_kernels_write_a_weight(device: torch.device) -> None:
    _, weight, _ = (one.to(device).detach() for one in operands([1, 1, 1]))
    for matrices in (weight, weight.repeat(1, 2, 1).bfloat16()):  # 80 and 160 rows: less and more than a tile
        wanted = weight_in_groups(matrices, rows=True, columns=True)
        cast_groups_reference(matrices.flatten(0, 1), matrices_of(matrices), wanted)
        check_forms(in_triton(matrices.flatten(0, 1), matrices_of(matrices), wanted), wanted)


def check_forms(found: GroupForms, wanted: GroupForms, places: int | None = None) -> None:
    for name, ours, theirs in zip(wanted._fields, found, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and ours.dtype == E4M3:
            ours, theirs = (one[..., :places].contiguous().view(torch.uint8) for one in (ours, theirs))
        assert ours is None or torch.equal(ours, theirs), name


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_the_kernels_clip_nothing_that_is_not_a_number(lost: float, device: torch.device) -> None:
    x = torch.randn(40, 32, device=device)
    x[3, 5] = lost
    groups = groups_of(ends_of([20, 20]).to(device), 40)
    made = in_triton(x, groups, in_groups(x, groups, rows=True, columns=True))
    assert (made.rows.float() * made.row_scales[:, None])[3].isnan().all()
    assert not made.row_scales[3].isfinite()
    assert made.row_scales.isfinite().sum() == 39
    assert not made.column_scales[0, 5].isfinite()
    assert made.column_scales.isfinite().sum() == 63


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_products_equal_their_reference(sizes: list[int], dtype: torch.dtype) -> None:
    x, weight, grad = operands(sizes, dtype)
    found = results(x, weight, ends_of(sizes), grad)
    wanted = fp8_grouped_product_reference(x.detach(), weight.detach(), ends_of(sizes), grad)
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32]
    for name, ours, theirs in zip(("out", "grad of x", "grad of weight"), found, wanted, strict=True):
        # The same summands in another order, then rounded to bf16: at most a step apart.
        assert torch.allclose(ours, theirs, rtol=2**-7, atol=1e-6 * theirs.abs().max().item()), name
    assert [(one == 0).all().item() for one in found[2]] == [size == 0 for size in sizes]


@pytest.mark.parametrize("sizes", [[64], [300, 0, 1, 129, 128, 127]], ids=str)
def test_the_error_is_that_of_rounded_operands(sizes: list[int]) -> None:
    """Two operands in e4m3, each off by at most half a step, evenly spread: a third of its square, summed at random."""
    x, weight, grad = operands(sizes)
    exact = [x.float(), weight, grad.float()]
    spans = [slice(*span) for span in pairwise([0, *ends_of(sizes).tolist()])]
    truth = (
        torch.cat([exact[0][rows] @ matrix.T for rows, matrix in zip(spans, weight, strict=True)]),
        torch.cat([exact[2][rows] @ matrix for rows, matrix in zip(spans, weight, strict=True)]),
        torch.stack([exact[2][rows].T @ exact[0][rows] for rows in spans]),
    )
    for ours, theirs in zip(results(x, weight, ends_of(sizes), grad), truth, strict=True):
        assert 0.002 < relative_error(ours, theirs.detach()) < math.hypot(HALF_STEP, HALF_STEP) / math.sqrt(3)


def test_small_rows_and_channels_are_as_exact_as_large_ones() -> None:
    """One scale a tensor would lose what is a millionth of the largest."""
    x, weight, grad = operands([48, 16])
    shrunk = x.detach().clone()
    shrunk[5] *= 2.0**-30
    scaled = grad.clone()
    scaled[:, 7] *= 2.0**-30
    plain = results(x, weight, ends_of([48, 16]), grad)
    found = results(shrunk.requires_grad_(), weight, ends_of([48, 16]), scaled)
    assert torch.equal(found[0][5], plain[0][5] * 2.0**-30)
    others = results(shrunk, weight, ends_of([48, 16]), grad)[2]
    assert torch.equal(found[2][:, 7], others[:, 7] * 2.0**-30)


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e30])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_zeros_and_great_magnitudes(magnitude: float, where: int) -> None:
    given = list(operands([20, 44]))
    given[where].data.mul_(0.0 if magnitude == 0 else magnitude / given[where].abs().max().item())
    x, weight, grad = given
    found = results(x, weight, ends_of([20, 44]), grad)
    assert all(torch.isfinite(one).all() for one in found)
    if magnitude == 0 and where < 2:
        assert (found[0] == 0).all()


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_what_is_not_a_number_reaches_all_that_it_touches(lost: float) -> None:
    x, weight, grad = operands([20, 44])
    x.data[3, 5] = lost
    out, _, grad_weight = results(x, weight, ends_of([20, 44]), grad)
    assert out[3].isnan().all()
    assert out.isnan().sum() == OUTPUTS
    assert grad_weight[0, :, 5].isnan().all()
    assert grad_weight.isnan().sum() == OUTPUTS


def test_only_what_is_wanted_is_computed() -> None:
    x, weight, grad = operands([20, 44])
    wanted = results(x, weight, ends_of([20, 44]), grad)
    for leaf, place in ((x, 1), (weight, 2)):
        other = weight if leaf is x else x
        other.requires_grad_(False)
        out = fp8_grouped_product(x, weight, ends_of([20, 44]))
        assert torch.equal(torch.autograd.grad(out, leaf, grad)[0], wanted[place])
        other.requires_grad_(True)


def test_rows_are_cast_once_for_gate_and_up(monkeypatch) -> None:
    casts = []
    plain = fp8_grouped_gemm.in_groups
    monkeypatch.setattr(
        fp8_grouped_gemm, "in_groups", lambda *given, **named: (casts.append(named), plain(*given, **named))[1]
    )
    x, weight, _ = operands([20, 44])
    ends = ends_of([20, 44])
    first = fp8_grouped_product(x, weight, ends)
    assert torch.equal(fp8_grouped_product(x, weight, ends), first)
    assert len(casts) == 1
    fp8_grouped_product(x, weight, ends.clone())
    x.data = x.data.clone()
    with torch.no_grad():
        x.mul_(2)
    assert torch.equal(fp8_grouped_product(x, weight, ends), first * 2)
    assert len(casts) == 3


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32], ids=str)
def test_a_weight_s_gradient_comes_in_the_format_that_it_asks_for(wanted: torch.dtype) -> None:
    x, weight, grad = operands([20, 44])
    plain = results(x, weight, ends_of([20, 44]), grad)[2]
    for dtype in (torch.bfloat16, torch.float32):
        leaf = weight.detach().to(dtype).requires_grad_()
        leaf.grad_dtype = wanted
        fp8_grouped_product(x, leaf, ends_of([20, 44])).backward(grad)
        assert leaf.grad.dtype == wanted
        assert torch.equal(leaf.grad.float(), plain)  # which does not depend on the weight
    assert results(x, weight * 1, ends_of([20, 44]), grad)[2].dtype == torch.float32, "no leaf: its own format"


def test_a_kept_weight_is_cast_when_it_has_changed_and_only_then(monkeypatch) -> None:
    from llmb.ops.quant import group_quant

    casts = []
    plain = group_quant.cast_groups
    monkeypatch.setattr(group_quant, "cast_groups", lambda *given: (casts.append(given[0]), plain(*given))[1])
    x, weight, grad = operands([20, 44])
    ends, kept = ends_of([20, 44]), WeightForms()

    def of_weights() -> int:
        return sum(len(one) == weight.shape[:2].numel() for one in casts)

    for _ in range(2):  # two micro-batches
        for ours, theirs in zip(results(x, weight, ends, grad, kept=kept), results(x, weight, ends, grad), strict=True):
            assert torch.equal(ours, theirs)
    assert of_weights() == 1 + 2 * 2  # the others cast in each pass
    memory = kept.of(weight, x.dtype).columns.data_ptr()
    with torch.no_grad():
        weight.neg_()
    out = fp8_grouped_product(x, weight, ends, kept=kept)
    assert torch.equal(out, fp8_grouped_product(x, weight, ends))
    weight.data.neg_()  # as a kernel would that torch knows nothing of
    assert torch.equal(fp8_grouped_product(x, weight, ends, kept=kept), out)
    torch.autograd.graph.increment_version(weight)
    assert torch.equal(fp8_grouped_product(x, weight, ends, kept=kept), -out)
    assert kept.of(weight, x.dtype).columns.data_ptr() == memory, "in the same memory"
