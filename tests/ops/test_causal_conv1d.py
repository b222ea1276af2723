"""Causal conv1d: the reference against its definition, and the kernels against the reference in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.mamba.causal_conv1d import causal_conv1d

pytest.importorskip("triton")


def inputs(
    batch: int, tokens: int, groups: int, sections: tuple[int, ...], kernel_size: int, scale: float = 1.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    channels = groups * sum(sections)
    shapes = ((batch, tokens, groups, sum(sections)), (channels, 1, kernel_size), (channels,))
    return [torch.randn(*shape, generator=generator) * scale for shape in shapes]


def with_gradients(function, tensors: list[Tensor], sections: tuple[int, ...]) -> list[Tensor]:
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*tensors, sections)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def test_reference_matches_the_definition() -> None:
    x, weight, bias = inputs(2, 9, 1, (5,), 4)
    out = causal_conv1d(x, weight, bias, (5,))
    for t in range(9):
        window = range(max(0, t - 3), t + 1)
        acc = bias + sum(weight[:, 0, 3 - (t - u)] * x[:, u, 0] for u in window)
        torch.testing.assert_close(out[:, t], F.silu(acc))


def test_grouped_channels_become_sectioned() -> None:
    sections_of_group = ["value0", "value1", "b", "c"]
    x, weight, bias = inputs(1, 3, 2, (2, 1, 1), 2)
    out = causal_conv1d(x, weight, bias, (2, 1, 1))
    grouped = [(group, name) for group in range(2) for name in sections_of_group]
    sectioned = [(0, "value0"), (0, "value1"), (1, "value0"), (1, "value1"), (0, "b"), (1, "b"), (0, "c"), (1, "c")]
    for index, channel in enumerate(sectioned):
        channel_index = grouped.index(channel)
        alone = causal_conv1d(
            x.flatten(2)[..., None, channel_index, None], weight[channel_index, None], bias[channel_index, None], (1,)
        )
        torch.testing.assert_close(out[..., index], alone[..., 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "tokens", "groups", "sections", "kernel_size"),
    [
        (2, 66, 2, (15, 10, 10), 4),
        (1, 1, 1, (3,), 4),
        (1, 70, 4, (1, 1), 2),
        (3, 5, 1, (8, 4, 4), 3),
        (1, 9, 2, (2,), 1),
        (1, 3, 5, (3, 8, 8), 2),
        (1, 290, 2, (70, 5, 5), 4),
    ],
)
@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_kernels_match_the_reference_in_fp64(
    batch: int,
    tokens: int,
    groups: int,
    sections: tuple[int, ...],
    kernel_size: int,
    scale: float,
    device: torch.device,
) -> None:
    tensors = inputs(batch, tokens, groups, sections, kernel_size, scale)
    exact = with_gradients(causal_conv1d.reference, [tensor.double() for tensor in tensors], sections)
    actual = with_gradients(causal_conv1d.triton, [tensor.to(device) for tensor in tensors], sections)
    for tensor, expected in zip(actual, exact, strict=True):
        assert tensor.shape == expected.shape
        assert (tensor.cpu() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_kernels_on_a_slice_in_bf16_with_weights_in_fp32(device: torch.device) -> None:
    sections = (10, 5, 5)
    x, weight, bias = (tensor.to(device) for tensor in inputs(2, 9, 2, sections, 4))
    padded = torch.cat((x, x, x), dim=-1).bfloat16()
    x_slice = padded[..., 20:40]
    actual = with_gradients(causal_conv1d.triton, [x_slice, weight, bias], sections)
    exact = with_gradients(
        causal_conv1d.reference, [tensor.double().cpu() for tensor in (x_slice, weight, bias)], sections
    )
    assert [tensor.dtype for tensor in actual] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for tensor, expected in zip(actual, exact, strict=True):
        assert (
            tensor.cpu().double() - expected
        ).norm() / expected.norm() < 2**-7  # one bf16 step: the interpreter truncates
