"""A step of AdamW in every format: plain torch against torch.optim, the kernel against plain torch to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmb.ops.optim.adam import (
    LARGEST_BF16,
    Rounding,
    adam_scalars,
    adam_update,
    adam_update_reference,
    exact_weight,
    random_bits,
)

pytest.importorskip("triton")
from llmb.ops.optim.adam_triton import adam_update_triton

HOW: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}
BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = {  # of param, grad, m and v; whether the low half is kept; how it is rounded
    "fp32": (FP32, FP32, FP32, False, "nearest"),
    "master": (BF16, FP32, FP32, True, "nearest"),
    "stochastic": (BF16, BF16, BF16, False, "stochastic"),
    "bf16": (BF16, BF16, BF16, False, "nearest"),
    "mixed": (BF16, FP32, BF16, True, "stochastic"),
}


def state(name: str, n: int, device: torch.device, size: float = 1.0) -> tuple[list[Tensor | None], Rounding]:
    """param, grad, m, v, low."""
    param_format, grad_format, state_format, keeps_low, rounding = FORMATS[name]
    generator = torch.Generator().manual_seed(n)
    param, grad, m = (torch.randn(n, generator=generator) for _ in range(3))
    v = torch.rand(n, generator=generator)
    low = torch.randint(-(2**15), 2**15, (n,), generator=generator).to(torch.int16) if keeps_low else None
    tensors = [param.to(param_format), (grad * size).to(grad_format), m.to(state_format), v.to(state_format), low]
    return [None if one is None else one.to(device) for one in tensors], rounding  # type: ignore[return-value]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def step_with(form, tensors: list, rounding: Rounding, factor: float = 0.5, step: int = 3, seed: int = 11) -> list:
    """What becomes of them."""
    tensors = [None if one is None else one.clone() for one in tensors]
    form(*tensors, adam_scalars(**HOW, step=step, seed=seed), torch.tensor(factor, device=tensors[0].device), rounding)
    return tensors


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "size"), [(1, 1.0), (1024, 0.0), (2500, 1.0), (40, 1e15)])
def test_the_kernel_gives_what_torch_gives_to_the_bit(name: str, n: int, size: float, device: torch.device) -> None:
    tensors, rounding = state(name, n, device, size)
    wanted, found = (step_with(form, tensors, rounding) for form in (adam_update_reference, adam_update_triton))
    for one, other in zip(wanted, found, strict=True):
        assert (one is None and other is None) or same_bits(one, other)
    assert not same_bits(wanted[0], tensors[0]) or name == "bf16"


def test_fp32_is_the_optimizer_of_torch() -> None:
    (param, grad, *_), _ = state("fp32", 500, torch.device("cpu"))
    theirs = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros(500), torch.zeros(500)
    for step in range(1, 8):
        gradient = grad * torch.cos(torch.arange(500.0) * step)
        theirs.grad = gradient * 0.5
        optimizer.step()
        adam_update(
            param, gradient, m, v, None, **HOW, step=step, factor=torch.tensor(0.5), rounding="nearest", seed=step
        )
        torch.testing.assert_close(param, theirs.detach(), rtol=2e-6, atol=1e-7)


def test_a_weight_in_two_halves_is_the_weight_in_one_to_the_bit(device: torch.device) -> None:
    (param, grad, m, v, low), rounding = state("master", 700, device)
    assert low is not None
    whole = [exact_weight(param, low), grad, m, v, None]
    halves = [param, grad, m, v, low]
    for step in range(1, 5):
        whole = step_with(adam_update_triton, whole, rounding, step=step)
        halves = step_with(adam_update_triton, halves, rounding, step=step)
        assert same_bits(exact_weight(halves[0], halves[4]), whole[0])
        rounded = halves[0].double()
        spacing = rounded.abs() * 2**-7
        assert ((rounded - whole[0].double()).abs() <= spacing / 2).all()


@pytest.mark.parametrize("factor", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["master", "stochastic"])
def test_nothing_changes_where_gradients_are_not_finite(name: str, factor: float, device: torch.device) -> None:
    tensors, rounding = state(name, 50, device)
    for form in (adam_update_reference, adam_update_triton):
        for one, other in zip(tensors, step_with(form, tensors, rounding, factor), strict=True):
            assert (one is None and other is None) or same_bits(one, other)


def kept(value: float, n: int, seed: int, form, device: torch.device) -> tuple[float, Tensor]:
    """What a parameter should be after a step without gradient or state, and what n of them in bf16 are."""
    param = torch.full((n,), value, dtype=BF16, device=device)
    grad, m, v = (torch.zeros(n, device=device) for _ in range(3))
    scalars = adam_scalars(**HOW, step=1, seed=seed)
    exact = param[0].float().item() * torch.tensor(scalars.keep).item()
    form(param, grad, m, v, None, scalars, torch.tensor(1.0, device=device), "stochastic")
    return exact, param.cpu()


def test_rounding_at_random_is_fair(device: torch.device) -> None:
    """Over all, at any one place over seeds, and of any one seed over places: within a few standard errors."""
    seeds, n = 60, 1000
    rounds = [kept(1.5, n, seed, adam_update_reference, device) for seed in range(seeds)]
    exact, found = rounds[0][0], torch.stack([one for _, one in rounds]).double()
    below, above = found.min().item(), found.max().item()
    assert above - below == 2**-7
    share = (exact - below) / (above - below)
    assert 0.05 < share < 0.95
    up, error = (found == above).double(), (share * (1 - share)) ** 0.5
    assert abs(up.mean().item() - share) < 4 * error / (seeds * n) ** 0.5
    assert (up.mean(0) - share).abs().max() < 5 * error / seeds**0.5
    assert (up.mean(1) - share).abs().max() < 5 * error / n**0.5


def test_random_bits_are_even_and_know_nothing_of_each_other() -> None:
    n = 2**16
    drawn = [random_bits(n, adam_scalars(**HOW, step=1, seed=seed), torch.device("cpu")) for seed in (0, 1, 2**40)]
    streams = torch.stack([bits.double() for three in drawn for bits in three]) / 2**16
    assert streams.min() >= 0
    assert streams.max() < 1
    assert ((streams.mean(1) - 0.5).abs() < 5 * (1 / 12 / n) ** 0.5).all()
    pairs = torch.corrcoef(torch.cat((streams, streams.roll(1, dims=1))))  # also with the neighbour's
    assert (pairs - torch.eye(18)).abs().max() < 5 / n**0.5
    each_bit = torch.stack([(bits >> bit & 1).double().mean() for bit in range(16) for bits in drawn[0]])
    assert (each_bit - 0.5).abs().max() < 5 * 0.5 / n**0.5


def test_a_result_depends_on_the_seed_and_not_on_the_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, rounding = state("stochastic", 1500, device)
    first = step_with(adam_update_triton, tensors, rounding)
    other = step_with(adam_update_triton, tensors, rounding, seed=12)
    monkeypatch.setattr("llmb.ops.optim.adam_triton.STRETCH", 256)
    again = step_with(adam_update_triton, tensors, rounding)
    assert all(same_bits(first[index], again[index]) for index in (0, 2, 3))
    assert not any(same_bits(first[index], other[index]) for index in (0, 2, 3))


@pytest.mark.parametrize("form", [adam_update_reference, adam_update_triton])
def test_rounding_at_random_keeps_what_is_no_number_and_stays_finite(form, device: torch.device) -> None:
    """With m as the witness: its gradient brings it to just below where bf16 ends, or to what it cannot leave."""
    n = 200
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, LARGEST_BF16, -LARGEST_BF16, 0.0]).repeat_interleave(n)
    m = values.to(BF16).to(device)
    grad = torch.where(values.isfinite(), values.sign() * 3.4e38, values).to(device)  # not a number of bf16
    param, v = torch.zeros(len(m), dtype=BF16, device=device), torch.zeros(len(m), device=device)
    form(param, grad, m, v, None, adam_scalars(**HOW, step=1, seed=5), torch.tensor(1.0, device=device), "stochastic")
    no_number, plus, minus, most, least, nothing = m.cpu().float().split(n)
    assert no_number.isnan().all()
    assert (plus.isnan() | (plus == torch.inf)).all()
    assert (minus.isnan() | (minus == -torch.inf)).all()
    assert (most == LARGEST_BF16).all()
    assert (least == -LARGEST_BF16).all()
    assert (nothing == 0).all()
    assert param.cpu()[:n].isnan().all()


@pytest.mark.parametrize("form", [adam_update_reference, adam_update_triton])
def test_a_weight_that_is_no_number_shows_it_in_its_upper_half(form, device: torch.device) -> None:
    (param, grad, m, v, low), rounding = state("master", 3, device)
    grad[1] = torch.nan  # type: ignore[index]
    after = step_with(form, [param, grad, m, v, low], rounding)
    assert after[0].isnan().tolist() == [False, True, False]
    assert exact_weight(after[0], after[4]).isnan().tolist() == [False, True, False]
