"""Steps of autograd around the training kernels: values and slopes of the plain modules that they stand for."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.ops.activation import activation_autograd, gated_mlp_autograd
from llmb.ops.activation.activation_autograd import ACTIVATIONS, activated
from llmb.ops.activation.gated_mlp_autograd import gated_mlp
from llmb.ops.gemm.linear_autograd import linear, linears
from llmb.ops.norm import rms_norm_autograd
from llmb.ops.norm.rms_norm_autograd import norm_beside
from llmb.ops.rope import rope_autograd
from llmb.ops.rope.rope import rotate
from llmb.ops.rope.rope_autograd import rotated

EPS = 1e-5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return drawn.to(DEVICE, dtype)


def slopes(function: Callable[..., Tensor], slope: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The value, and the slope of each input."""
    watched = [one.detach().requires_grad_() for one in inputs]
    value = function(*watched)
    return [value.detach(), *torch.autograd.grad((value * slope).sum(), watched)]


def assert_same(found: list[Tensor], wanted: list[Tensor], bound: float = 2e-5) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm() + 1e-30


@pytest.fixture(params=["plain", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with plain torch and once with the Triton kernels, interpreted where there is no GPU."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        from llmb.ops.activation.activation_triton import activated_backward_triton, activated_triton
        from llmb.ops.activation.swiglu_triton import swiglu_backward_triton, swiglu_triton
        from llmb.ops.norm.rms_norm_triton import rms_norm_backward_triton, rms_norm_triton
        from llmb.ops.rope.rope_triton import rotate_into_triton

        def norm(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
            rms_norm_triton(x_NC, weight_C, eps, out := torch.empty_like(x_NC, memory_format=torch.contiguous_format))
            return out

        def gate(h_N2F: Tensor) -> Tensor:
            swiglu_triton(h_N2F, out := torch.empty_like(h_N2F[:, : h_N2F.shape[1] // 2]))
            return out

        monkeypatch.setattr(activation_autograd, "_forward", activated_triton)
        monkeypatch.setattr(activation_autograd, "_backward", activated_backward_triton)
        monkeypatch.setattr(rms_norm_autograd, "rms_norm", norm)
        monkeypatch.setattr(
            rms_norm_autograd, "rms_norm_backward", lambda *args, fresh: rms_norm_backward_triton(*args, fresh)
        )
        monkeypatch.setattr(rope_autograd, "rotate_into", rotate_into_triton)
        monkeypatch.setattr(gated_mlp_autograd, "swiglu", gate)
        monkeypatch.setattr(gated_mlp_autograd, "swiglu_backward", swiglu_backward_triton)
    return request.param


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_a_norm_and_the_stream_around_its_block(way: str, size: float) -> None:
    x, weight, slope = numbers(2, 3, 20) * size, numbers(20), numbers(2, 3, 20, seed=1)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        normed, stream = norm_beside(x, weight, EPS)
        return stream + normed.sin()

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x + F.rms_norm(x, (20,), weight, EPS).sin()

    assert_same(slopes(ours, slope, x, weight), slopes(plain, slope, x, weight))


def test_a_norm_alone_and_a_stream_alone(way: str) -> None:
    x, weight, slope = numbers(2, 3, 20), numbers(20), numbers(2, 3, 20, seed=1)
    found = slopes(lambda x, weight: norm_beside(x, weight, EPS)[0], slope, x, weight)
    assert_same(found, slopes(lambda x, weight: F.rms_norm(x, (20,), weight, EPS), slope, x, weight))
    x.requires_grad_()
    (dx,) = torch.autograd.grad((norm_beside(x, weight, EPS)[1] * slope).sum(), x)
    assert torch.equal(dx, slope)


def test_a_norm_of_channels_inside_wider_rows_and_of_channels_that_lie_apart(way: str) -> None:
    weight, slope = numbers(12), numbers(2, 3, 12, seed=1)
    for x in (numbers(2, 3, 30)[..., 5:17], numbers(2, 12, 3).transpose(1, 2)):
        found = slopes(lambda x, weight: norm_beside(x, weight, EPS)[0], slope, x, weight)
        assert_same(found, slopes(lambda x, weight: F.rms_norm(x, (12,), weight, EPS), slope, x, weight))


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
def test_a_rotation_of_several_sequences(way: str, layout: str) -> None:
    angle = numbers(5, 4) * 100
    x, slope = numbers(2, 5, 3, 8), numbers(2, 5, 3, 8, seed=1)
    if layout == "heads first":  # as attention leaves its slopes
        x, slope = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (x, slope))
    found = slopes(lambda x: rotated(x, angle.cos(), angle.sin()), slope, x)
    assert_same(found, slopes(lambda x: rotate(x, angle.cos(), angle.sin()), slope, x))


@pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
def test_a_gated_mlp(way: str, size: float) -> None:
    x, gate, up, down = numbers(2, 3, 12) * size, numbers(20, 12), numbers(20, 12, seed=1), numbers(12, 20, seed=2)
    slope = numbers(2, 3, 12, seed=3)

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    assert_same(slopes(gated_mlp, slope, x, gate, up, down), slopes(plain, slope, x, gate, up, down))


def test_a_gated_mlp_in_bf16_with_weights_in_fp32() -> None:
    inputs = numbers(7, 32), numbers(64, 32), numbers(64, 32, seed=1), numbers(32, 64, seed=2)
    slope = numbers(7, 32, seed=3)
    wanted = slopes(gated_mlp, slope, *inputs)
    found = slopes(gated_mlp, slope.bfloat16(), inputs[0].bfloat16(), *inputs[1:])
    assert [one.dtype for one in found] == [torch.bfloat16] * 2 + [torch.float32] * 3
    assert_same(found, wanted, 0.02)


def test_a_gated_mlp_refuses_a_second_backward_pass() -> None:
    loss = gated_mlp(numbers(3, 4).requires_grad_(), numbers(8, 4), numbers(8, 4), numbers(4, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_several_products_of_one_input() -> None:
    x, *weights = numbers(2, 3, 12), numbers(8, 12), numbers(4, 12), numbers(5, 12)
    slope = numbers(2, 3, 17)
    found = slopes(lambda x, *weights: torch.cat(linears(x, *weights), dim=-1), slope, x, *weights)
    assert_same(found, slopes(lambda x, *weights: F.linear(x, torch.cat(weights)), slope, x, *weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_micro_batches_add_up_in_their_own_memory(dtype: torch.dtype) -> None:
    weight = nn.Parameter(numbers(6, 4))
    total = torch.zeros(6, 4, device=DEVICE)
    places = set()
    for micro in range(3):
        x = numbers(2, 5, 4, seed=micro, dtype=dtype)
        linear(x, weight).backward(slope := numbers(2, 5, 6, seed=micro, dtype=dtype))
        total += slope.flatten(0, 1).float().T @ x.flatten(0, 1).float()
        places.add(weight.grad.data_ptr())
    assert weight.grad.dtype == torch.float32
    assert len(places) == 1
    assert_same([weight.grad], [total])


def test_a_narrow_weight_may_ask_for_a_wide_gradient() -> None:
    weight = nn.Parameter(numbers(6, 4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    x, slope = numbers(5, 4, dtype=torch.bfloat16), numbers(5, 6, dtype=torch.bfloat16)
    for micro in range(1, 3):
        linear(x, weight).backward(slope)
        assert weight.grad.dtype == torch.float32
        assert_same([weight.grad], [micro * (slope.float().T @ x.float())])


def test_gradients_that_somebody_watches_take_the_way_of_autograd() -> None:
    weight = nn.Parameter(numbers(6, 4))
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for _ in range(2):
        linear(numbers(5, 4), weight).sum().backward()
    assert_same([seen[1]], [2 * seen[0]])


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("shape", "size"), [((3, 10), 0.0), ((2, 3, 700), 1.0), ((1,), 3.0), ((5, 33), 100.0)])
def test_activations_gated_and_not(way: str, kind: str, shape: tuple[int, ...], size: float) -> None:
    x, up, slope = (numbers(*shape, seed=seed) * (size if seed == 0 else 1.0) for seed in range(3))
    plain = ACTIVATIONS[kind]
    assert_same(slopes(lambda x: activated(x, kind), slope, x), slopes(plain, slope, x))
    found = slopes(lambda x, up: activated(x, kind, up), slope, x, up)
    assert_same(found, slopes(lambda x, up: plain(x) * up, slope, x, up))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_what_lies_far_out_or_nowhere(way: str, kind: str) -> None:
    x = torch.tensor([-1e10, -1e4, 1e4, 1e10, torch.nan], device=DEVICE)
    found, wanted = (slopes(form, torch.ones_like(x), x) for form in (lambda x: activated(x, kind), ACTIVATIONS[kind]))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_activations_in_bf16_are_rounded_once(way: str) -> None:
    gate, up = numbers(4, 50, dtype=torch.bfloat16), numbers(4, 50, seed=1, dtype=torch.bfloat16)
    found = activated(gate, "silu", up)
    exact = F.silu(gate.double()) * up.double()
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2**-7 * exact.abs()).all()  # the interpreter cuts off
