"""A step of AdamW: against torch.optim, split master weights, stochastic rounding, special values."""

from typing import Any

import pytest
import torch
from op_cases.optim import STATES
from op_cases.optim import step as adam_case
from seeded_tensors import same_bits
from torch import Tensor

from llmb.ops.optim.adam import BF16_MAX, adam_scalars, adam_step, adam_update, join_master_weight, random_bits
from llmb.ops.optim.fused_adamw import FusedAdamW

pytest.importorskip("triton")

SETTINGS: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
BF16 = torch.bfloat16
FP32_STATE, MASTER, STOCHASTIC = STATES[0], STATES[1], STATES[3]
both_implementations = pytest.mark.parametrize("implementation", ["reference", "triton"])


def state(dtypes: tuple, n: int, device: torch.device) -> list[Tensor | None]:
    """param, grad, m, v, low."""
    arguments, _ = adam_case(torch.Generator().manual_seed(n), device, *dtypes, n)
    return list(arguments[:5])


def step_with(
    implementation: str, tensors: list, dtypes: tuple, factor: float = 0.5, step: int = 3, seed: int = 11
) -> list:
    """Updated copies of the tensors."""
    tensors = [None if x is None else x.clone() for x in tensors]
    scalars = adam_scalars(**SETTINGS, step=step, seed=seed)
    getattr(adam_step, implementation)(*tensors, scalars, torch.tensor(factor, device=tensors[0].device), dtypes[-1])
    return tensors


def test_fp32_matches_torch_adamw() -> None:
    param, grad, *_ = state(FP32_STATE, 500, torch.device("cpu"))
    reference = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros(500), torch.zeros(500)
    for step in range(1, 8):
        gradient = grad * torch.cos(torch.arange(500.0) * step)
        reference.grad = gradient * 0.5
        optimizer.step()
        adam_update(
            param, gradient, m, v, None, **SETTINGS, step=step, factor=torch.tensor(0.5), rounding="nearest", seed=step
        )
        torch.testing.assert_close(param, reference.detach(), rtol=2e-6, atol=1e-7)


def test_fused_adamw_is_the_optimizer_of_torch(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix, vector = torch.randn(6, 5, generator=generator), torch.randn(7, generator=generator)
    actual, expected = ([torch.nn.Parameter(x.to(device, copy=True)) for x in (matrix, vector)] for _ in range(2))
    fused = FusedAdamW(actual, (0.9, 0.95), 1e-8, 0.1)
    groups = [{"params": expected[:1], "weight_decay": 0.1}, {"params": expected[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(4):
        discarded = step == 2
        for weight, reference in zip(actual, expected, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator).to(device)
            reference.grad = None if discarded else weight.grad / 4
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.step()
        with torch.no_grad():
            fused.step(
                0.01 / (step + 1), torch.tensor(4.0, device=device), torch.tensor(float(discarded), device=device)
            )
    for weight, reference in zip(actual, expected, strict=True):
        assert same_bits(weight.detach(), reference.detach())
        assert fused.state[weight]["step"] == 3


def test_split_master_weights_have_the_bits_of_fp32_weights(device: torch.device) -> None:
    split = param, grad, m, v, low = state(MASTER, 700, device)
    fp32 = [join_master_weight(param, low), grad, m, v, None]
    for step in range(1, 5):
        fp32 = step_with("triton", fp32, FP32_STATE, step=step)
        split = step_with("triton", split, MASTER, step=step)
        assert same_bits(join_master_weight(split[0], split[4]), fp32[0])
        rounded = split[0].double()
        spacing = rounded.abs() * 2**-7
        assert ((rounded - fp32[0].double()).abs() <= spacing / 2).all()


@pytest.mark.parametrize("factor", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtypes", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_nonfinite_gradients_change_nothing(dtypes: tuple, factor: float) -> None:
    tensors = state(dtypes, 50, torch.device("cpu"))
    for before, after in zip(tensors, step_with("reference", tensors, dtypes, factor), strict=True):
        assert (before is None and after is None) or same_bits(before, after)


def decayed(value: float, n: int, seed: int, device: torch.device) -> tuple[float, Tensor]:
    """The exact value of a parameter after a step without gradient or state, and n of them rounded to bf16."""
    param = torch.full((n,), value, dtype=BF16, device=device)
    grad, m, v = (torch.zeros(n, device=device) for _ in range(3))
    scalars = adam_scalars(**SETTINGS, step=1, seed=seed)
    exact = param[0].float().item() * torch.tensor(scalars.decay_factor).item()
    adam_step.reference(param, grad, m, v, None, scalars, torch.tensor(1.0, device=device), "stochastic")
    return exact, param.cpu()


def test_stochastic_rounding_is_unbiased(device: torch.device) -> None:
    """Overall, for each index over seeds, and for each seed over indices: within a few standard errors."""
    seeds, n = 60, 1000
    runs = [decayed(1.5, n, seed, device) for seed in range(seeds)]
    exact, rounded = runs[0][0], torch.stack([params for _, params in runs]).double()
    below, above = rounded.min().item(), rounded.max().item()
    assert above - below == 2**-7
    fraction = (exact - below) / (above - below)
    assert 0.05 < fraction < 0.95
    up, error = (rounded == above).double(), (fraction * (1 - fraction)) ** 0.5
    assert abs(up.mean().item() - fraction) < 4 * error / (seeds * n) ** 0.5
    assert (up.mean(0) - fraction).abs().max() < 5 * error / seeds**0.5
    assert (up.mean(1) - fraction).abs().max() < 5 * error / n**0.5


def test_random_bits_are_uniform_and_uncorrelated() -> None:
    n = 2**16
    draws = [
        random_bits(0, n, adam_scalars(**SETTINGS, step=1, seed=seed), torch.device("cpu")) for seed in (0, 1, 2**40)
    ]
    streams = torch.stack([bits.double() for triple in draws for bits in triple]) / 2**16
    assert streams.min() >= 0
    assert streams.max() < 1
    assert ((streams.mean(1) - 0.5).abs() < 5 * (1 / 12 / n) ** 0.5).all()
    pairs = torch.corrcoef(torch.cat((streams, streams.roll(1, dims=1))))  # also with the neighbour's
    assert (pairs - torch.eye(18)).abs().max() < 5 / n**0.5
    each_bit = torch.stack([(bits >> bit & 1).double().mean() for bit in range(16) for bits in draws[0]])
    assert (each_bit - 0.5).abs().max() < 5 * 0.5 / n**0.5


@pytest.mark.parametrize("dtypes", STATES, ids=str)
def test_blocks_of_a_cpu_give_the_bits_of_one(dtypes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = state(dtypes, 3001, torch.device("cpu"))
    whole = step_with("reference", tensors, dtypes)
    monkeypatch.setattr("llmb.ops.optim.adam.CPU_BLOCK", 1000)
    assert all(
        same_bits(a, b) for a, b in zip(step_with("reference", tensors, dtypes), whole, strict=True) if b is not None
    )


def test_results_depend_on_the_seed_and_not_on_the_block_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = state(STOCHASTIC, 1500, device)
    first = step_with("triton", tensors, STOCHASTIC)
    other_seed = step_with("triton", tensors, STOCHASTIC, seed=12)
    monkeypatch.setattr("llmb.ops.optim.adam_triton.BLOCK", 256)
    repeated = step_with("triton", tensors, STOCHASTIC)
    assert all(same_bits(first[index], repeated[index]) for index in (0, 2, 3))
    assert not any(same_bits(first[index], other_seed[index]) for index in (0, 2, 3))


@both_implementations
def test_stochastic_rounding_keeps_nan_and_stays_finite(implementation: str, device: torch.device) -> None:
    """Observed in m: its gradient brings it just below the largest bf16, or to a value that it cannot leave."""
    n = 200
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, BF16_MAX, -BF16_MAX, 0.0]).repeat_interleave(n)
    m = values.to(BF16).to(device)
    grad = torch.where(values.isfinite(), values.sign() * 3.4e38, values).to(device)  # not representable in bf16
    param, v = torch.zeros(len(m), dtype=BF16, device=device), torch.zeros(len(m), device=device)
    scalars, factor = adam_scalars(**SETTINGS, step=1, seed=5), torch.tensor(1.0, device=device)
    getattr(adam_step, implementation)(param, grad, m, v, None, scalars, factor, "stochastic")
    nan, plus, minus, most, least, zero = m.cpu().float().split(n)
    assert nan.isnan().all()
    assert (plus.isnan() | (plus == torch.inf)).all()
    assert (minus.isnan() | (minus == -torch.inf)).all()
    assert (most == BF16_MAX).all()
    assert (least == -BF16_MAX).all()
    assert (zero == 0).all()
    assert param.cpu()[:n].isnan().all()


@both_implementations
def test_nan_shows_in_the_high_half(implementation: str, device: torch.device) -> None:
    tensors = state(MASTER, 3, device)
    tensors[1][1] = torch.nan  # type: ignore[index]
    after = step_with(implementation, tensors, MASTER)
    assert after[0].isnan().tolist() == [False, True, False]
    assert join_master_weight(after[0], after[4]).isnan().tolist() == [False, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing")
def test_kernel_is_compiled_once_for_all_steps(device: torch.device) -> None:
    from llmb.ops.optim.adam_triton import _adam_update

    tensors = state(FP32_STATE, 4096, device)

    def compiled_after(lr: float, step: int, seed: int) -> int:
        scalars = adam_scalars(**SETTINGS | {"lr": lr}, step=step, seed=seed)
        adam_step.triton(*tensors, scalars, torch.tensor(1.0, device=device), "stochastic")  # type: ignore[arg-type]
        return sum(len(kernels[0]) for kernels in _adam_update.device_caches.values())

    first, later = compiled_after(1e-3, 1, 0), ((0, 2, 1), (1, 16, 16), (1e-5, 100_000, 2**40))
    assert all(compiled_after(*values) == first for values in later)
