"""Visits to experts: sorted, copied and mixed, plain and by the kernels, against a loop over tokens in double."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from llmb.ops.moe import permute
from llmb.ops.moe.permute import copied, copied_beside, mixed, sorted_by_expert

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ROUNDED = {FP64: 1e-13, FP32: 1e-5, BF16: 2**-7}  # the interpreter cuts bf16 off


class Case(NamedTuple):
    tokens: int
    visits: int
    experts: int
    channels: int


CASES = {
    "one visit": Case(13, 1, 4, 64),
    "eight visits": Case(37, 8, 16, 96),
    "an odd width": Case(11, 3, 5, 53),
    "wider than a block": Case(5, 2, 3, 1100),
    "one token": Case(1, 4, 9, 32),
    "one channel": Case(6, 2, 2, 1),
}


@pytest.fixture(params=["plain", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> str:
    """Once with plain torch and once with the Triton kernels, interpreted where there is no GPU."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        from llmb.ops.moe import permute_triton as kernels

        monkeypatch.setattr(permute, "_copied", kernels.copied_triton)
        monkeypatch.setattr(permute, "_mixed", kernels.mixed_triton)
        monkeypatch.setattr(permute, "_mixed_backward", kernels.mixed_backward_triton)
        monkeypatch.setitem(globals(), "sorted_by_expert", kernels.sorted_by_expert_triton)
    else:
        monkeypatch.setattr(permute, "takes_triton", lambda _tensor: False)
    return request.param


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=FP64).to(dtype)


def chosen_of(case: Case, seed: int = 0) -> Tensor:
    """No token visits one twice, and where that leaves any, nobody visits the last."""
    likely = torch.arange(case.experts, 0, -1.0).square()
    if case.visits < case.experts:
        likely[-1] = 0
    return likely.expand(case.tokens, -1).multinomial(case.visits, generator=torch.Generator().manual_seed(seed))


def places_of(case: Case, device: torch.device) -> Tensor:
    return permute.sorted_by_expert_reference(chosen_of(case).to(device), case.experts)[0]


def slopes(out: Tensor, slope: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


def assert_rounded(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Each number by itself, against sums that do not cancel."""
    for ours, (theirs, size) in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        error = (ours.double().cpu() - theirs).abs()
        assert (error <= ROUNDED[FP32 if ours.dtype == FP32 else dtype] * size + 1e-30).all()


def sums(function, *inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What a function of products and sums makes of the numbers, and of their sizes."""
    exact = [one.detach().double().cpu() for one in inputs]
    return list(zip(function(*exact), function(*(one.abs() for one in exact)), strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("shape", "experts"), [((33, 3), 7), ((1, 1), 1), ((128, 1), 3), ((300, 2), 5), ((129,), 2), ((50, 8), 256)]
)
def test_visits_are_sorted_and_stay_in_order(
    way: str, device: torch.device, shape: tuple[int, ...], experts: int, dtype: torch.dtype
) -> None:
    likely = max(experts - 2, 1)  # nobody visits the last
    chosen = torch.randint(likely, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    places, ends = sorted_by_expert(chosen.to(device), experts)
    assert places.shape == chosen.shape
    assert places.dtype == ends.dtype == torch.int32
    order = sorted(range(chosen.numel()), key=lambda visit: (chosen.flatten()[visit].item(), visit))
    assert places.flatten()[order].tolist() == list(range(chosen.numel()))
    assert ends.tolist() == chosen.flatten().bincount(minlength=experts).cumsum(0).tolist()


@pytest.mark.parametrize("expert", [0, 3])
def test_all_visits_to_one_expert(way: str, device: torch.device, expert: int) -> None:
    places, ends = sorted_by_expert(torch.full((150, 2), expert, device=device), 4)
    assert torch.equal(places.cpu(), torch.arange(300, dtype=torch.int32).view(150, 2))
    assert ends.tolist() == [0] * expert + [300] * (4 - expert)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copies_and_the_sum_of_their_slopes(way: str, device: torch.device, case: Case, dtype: torch.dtype) -> None:
    places = places_of(case, device)
    x = numbers(case.tokens, case.channels, dtype=dtype).to(device).requires_grad_()
    slope = numbers(places.numel(), case.channels, seed=1, dtype=dtype).to(device)
    rows, dx = slopes(copied(x, places), slope, x)
    assert rows.dtype == dx.dtype == dtype
    for token, own in enumerate(places.tolist()):
        assert all(torch.equal(rows[place], x[token]) for place in own)
    assert_rounded([dx], sums(lambda d: [d[places.cpu().long()].sum(1)], slope), dtype)


def test_a_slope_from_beside_the_copies_is_added(way: str, device: torch.device) -> None:
    case = CASES["eight visits"]
    places, x = places_of(case, device), numbers(37, 96).to(device).requires_grad_()
    drows, dstream = numbers(296, 96, seed=1).to(device), numbers(37, 96, seed=2).to(device)
    rows, stream = copied_beside(x, places)
    assert torch.equal(stream, x)
    (dx,) = torch.autograd.grad((rows, stream), x, (drows, dstream), retain_graph=True)
    assert_rounded([dx], sums(lambda d, s: [d[places.cpu().long()].sum(1) + s], drows, dstream), FP32)
    assert torch.equal(torch.autograd.grad(stream, x, dstream)[0], dstream)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_weighted_sum_and_its_slopes(
    way: str, device: torch.device, case: Case, beside: bool, dtype: torch.dtype
) -> None:
    places = places_of(case, device)
    rows = numbers(places.numel(), case.channels, dtype=dtype).to(device).requires_grad_()
    weights = numbers(*places.shape, seed=1).abs().to(device).requires_grad_()
    other = numbers(case.tokens, case.channels, seed=2, dtype=dtype).to(device).requires_grad_()
    slope = numbers(case.tokens, case.channels, seed=3, dtype=dtype).to(device)
    inputs = (rows, weights, other) if beside else (rows, weights)
    found = slopes(mixed(rows, places, weights, other if beside else None), slope, *inputs)
    assert [one.dtype for one in found] == [dtype, dtype, FP32, dtype][: len(found)]

    def exact(rows: Tensor, weights: Tensor, other: Tensor, slope: Tensor) -> list[Tensor]:
        where = places.cpu().long()
        drows = torch.zeros_like(rows).index_put((where,), slope[:, None] * weights[:, :, None])
        out = (rows[where] * weights[:, :, None]).sum(1)
        dweights = (rows[where] * slope[:, None]).sum(2)
        return [out + other, drows, dweights, slope] if beside else [out, drows, dweights]

    assert_rounded(found, sums(exact, rows, weights, other, slope), dtype)


@pytest.mark.parametrize("size", [0.0, 1e30])
def test_zeros_and_large_numbers(way: str, device: torch.device, size: float) -> None:
    case = CASES["eight visits"]
    places = places_of(case, device)
    rows = (numbers(places.numel(), 96, dtype=BF16) * size).to(device).requires_grad_()
    weights = torch.full(places.shape, 0.125, device=device, requires_grad=True)
    out, drows, dweights = slopes(
        mixed(rows, places, weights), torch.ones(37, 96, device=device, dtype=BF16), *(rows, weights)
    )
    exact = rows.detach().double()[places.long()]
    assert (drows == 0.125).all()
    for ours, theirs in ((out, exact.mean(1)), (dweights, exact.sum(2))):
        assert (ours.double() - theirs).norm() <= 2**-7 * theirs.norm()


def test_a_slope_that_is_one_number_in_memory(way: str, device: torch.device) -> None:
    case = CASES["one visit"]
    places, rows = places_of(case, device), numbers(13, 64).to(device).requires_grad_()
    weights = torch.full((13, 1), 3.0, device=device, requires_grad=True)
    mixed(rows, places, weights).sum().backward()
    assert (rows.grad == 3).all()
    torch.testing.assert_close(weights.grad, rows.detach()[places.long()].sum(2))


def test_without_weights_each_undoes_the_other(way: str, device: torch.device) -> None:
    case = CASES["one visit"]
    places, x = places_of(case, device), numbers(13, 64).to(device).requires_grad_()
    out, dx = slopes(mixed(copied(x, places), places), slope := numbers(13, 64, seed=1).to(device), x)
    assert torch.equal(out, x)
    assert torch.equal(dx, slope)


def test_nobody_comes(way: str, device: torch.device) -> None:
    places, ends = sorted_by_expert(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    assert ends.tolist() == [0, 0, 0]
    x = torch.zeros(0, 16, device=device, requires_grad=True)
    weights = torch.zeros(0, 2, device=device, requires_grad=True)
    mixed(copied(x, places), places, weights, x).sum().backward()
    assert x.grad.shape == x.shape
    assert weights.grad.shape == weights.shape


def test_equal_inputs_give_equal_bits(way: str, device: torch.device) -> None:
    case = CASES["wider than a block"]
    places, x = places_of(case, device), numbers(5, 1100).to(device).requires_grad_()
    weights, slope = numbers(5, 2, seed=1).to(device).requires_grad_(), numbers(5, 1100, seed=2).to(device)
    found = [slopes(mixed(copied(x, places).sin(), places, weights), slope, x, weights) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_slopes_by_finite_differences() -> None:
    case = Case(4, 3, 5, 2)
    places = places_of(case, torch.device("cpu"))
    x, beside = (numbers(4, 2, seed=seed, dtype=FP64).requires_grad_() for seed in range(2))
    weights = numbers(4, 3, dtype=FP64).requires_grad_()

    def whole(x: Tensor, weights: Tensor, beside: Tensor) -> Tensor:
        rows, stream = copied_beside(x, places)
        return mixed(rows.sin(), places, weights, beside) + stream.cos()

    assert torch.autograd.gradcheck(whole, (x, weights, beside))
