"""Autograd functions around the training kernels: outputs and gradients of the plain modules that they replace."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from seeded_tensors import randn as seeded_randn
from torch import Tensor

from llmb.ops.activation.activation import ACTIVATIONS
from llmb.ops.activation.activation_autograd import fused_activation, gated_mlp
from llmb.ops.gemm.linear_autograd import linears
from llmb.ops.loss.scaled_add import scaled_add_
from llmb.ops.norm.rms_norm_autograd import rms_norm_and_add, rms_norm_with_residual
from llmb.ops.rope.rope import apply_rope
from llmb.ops.rope.rope_autograd import fused_rope

EPS = 1e-5
FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCES = {FP32: 2e-5, BF16: 0.01}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return seeded_randn(*shape, seed=seed, dtype=dtype, device=DEVICE)


def with_grads(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradient of each input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad((output * grad).sum(), leaves)]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 2e-5) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-30


@pytest.mark.parametrize(("scale", "dtype"), [(0.0, FP32), (1.0, FP32), (1e3, FP32), (1.0, BF16)])
@pytest.mark.usefixtures("implementation")
def test_rms_norm_with_residual(scale: float, dtype: torch.dtype) -> None:
    x, weight, grad = randn(2, 3, 20, dtype=dtype) * scale, randn(20), randn(2, 3, 20, seed=1)

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        normed, residual = rms_norm_with_residual(x, weight, EPS)
        return residual + normed.sin()

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x + F.rms_norm(x, (20,), weight, EPS).sin()

    assert_same(with_grads(fused, grad, x, weight), with_grads(plain, grad, x.float(), weight), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.usefixtures("implementation")
def test_rms_norm_and_add(dtype: torch.dtype) -> None:
    x, residual = (randn(2, 3, 20, seed=seed, dtype=dtype) for seed in (0, 2))
    weight, grad = randn(20), randn(2, 3, 20, seed=1)

    def plain(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return residual + F.rms_norm(x, (20,), weight, EPS)

    actual = with_grads(
        lambda x, weight, residual: rms_norm_and_add(x, weight, EPS, residual), grad, x, weight, residual
    )
    assert_same(actual, with_grads(plain, grad, x.float(), weight, residual.float()), TOLERANCES[dtype])


@pytest.mark.usefixtures("implementation")
def test_norm_alone_and_residual_alone() -> None:
    """Also of strided rows and of strided channels."""
    weight, grad = randn(12), randn(2, 3, 12, seed=1)
    for x in (randn(2, 3, 12), randn(2, 3, 30)[..., 5:17], randn(2, 12, 3).transpose(1, 2)):
        actual = with_grads(lambda x, weight: rms_norm_with_residual(x, weight, EPS)[0], grad, x, weight)
        assert_same(actual, with_grads(lambda x, weight: F.rms_norm(x, (12,), weight, EPS), grad, x, weight))
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad((rms_norm_with_residual(x, weight, EPS)[1] * grad).sum(), x)
        assert torch.equal(dx, grad)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.usefixtures("implementation")
def test_rope_of_several_sequences(layout: str, dtype: torch.dtype) -> None:
    angle = randn(5, 4) * 100
    x, grad = randn(2, 5, 3, 8, dtype=dtype), randn(2, 5, 3, 8, seed=1, dtype=dtype)
    if layout == "heads first":  # as attention leaves its gradients
        x, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (x, grad))
    actual = with_grads(lambda x: fused_rope(x, angle.cos(), angle.sin()), grad, x)
    expected = with_grads(lambda x: apply_rope(x, angle.cos(), angle.sin()), grad, x.float())
    assert_same(actual, expected, TOLERANCES[dtype])


@pytest.mark.parametrize(("scale", "activation"), [(0.0, "silu"), (1.0, "silu"), (100.0, "silu"), (1.0, "gelu")])
@pytest.mark.usefixtures("implementation")
def test_gated_mlp(scale: float, activation: str) -> None:
    x, gate, up, down = randn(2, 3, 12) * scale, randn(20, 12), randn(20, 12, seed=1), randn(12, 20, seed=2)
    grad = randn(2, 3, 12, seed=3)

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(ACTIVATIONS[activation](F.linear(x, gate)) * F.linear(x, up), down)

    fused = partial(gated_mlp, activation=activation)
    assert_same(with_grads(fused, grad, x, gate, up, down), with_grads(plain, grad, x, gate, up, down))


def test_gated_mlp_refuses_a_second_backward() -> None:
    loss = gated_mlp(randn(3, 4).requires_grad_(), randn(8, 4), randn(8, 4), randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_several_linears_of_one_input() -> None:
    x, *weights = randn(2, 3, 12), randn(8, 12), randn(4, 12), randn(5, 12)
    grad = randn(2, 3, 17)
    actual = with_grads(lambda x, *weights: torch.cat(linears(x, *weights), dim=-1), grad, x, *weights)
    assert_same(actual, with_grads(lambda x, *weights: F.linear(x, torch.cat(weights)), grad, x, *weights))


@pytest.mark.usefixtures("implementation")
def test_scaled_add_is_noticed_by_autograd() -> None:
    total = randn(4)
    version = total._version
    scaled_add_(total, randn(4, seed=1), torch.tensor(1.0, device=DEVICE), accumulate=True)
    assert total._version > version


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("shape", "scale"), [((3, 10), 0.0), ((2, 3, 700), 1.0), ((1,), 3.0), ((5, 33), 100.0)])
@pytest.mark.usefixtures("implementation")
def test_activations_with_and_without_gate(kind: str, shape: tuple[int, ...], scale: float) -> None:
    x, up, grad = (randn(*shape, seed=seed) * (scale if seed == 0 else 1.0) for seed in range(3))
    plain = ACTIVATIONS[kind]
    assert_same(with_grads(lambda x: fused_activation(x, kind), grad, x), with_grads(plain, grad, x))
    actual = with_grads(lambda x, up: fused_activation(x, kind, up), grad, x, up)
    assert_same(actual, with_grads(lambda x, up: plain(x) * up, grad, x, up))
