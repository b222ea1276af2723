"""The short convolution: torch's own against its definition, and the kernels against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.mamba.causal_conv1d import causal_conv, causal_conv_reference

pytest.importorskip("triton")
from llmb.ops.mamba.causal_conv1d_triton import causal_conv_triton


def inputs(
    batch: int, tokens: int, groups: int, sections: tuple[int, ...], reach: int, size: float = 1.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    channels = groups * sum(sections)
    shapes = ((batch, tokens, groups, sum(sections)), (channels, 1, reach), (channels,))
    return [torch.randn(*shape, generator=generator) * size for shape in shapes]


def with_gradients(form, tensors: list[Tensor], sections: tuple[int, ...]) -> list[Tensor]:
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = form(*tensors, sections)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def test_each_token_is_the_silu_of_a_sum_over_the_last_few() -> None:
    x, weight, bias = inputs(2, 9, 1, (5,), 4)
    out = causal_conv(x, weight, bias, (5,))
    for t in range(9):
        reached = range(max(0, t - 3), t + 1)
        total = bias + sum(weight[:, 0, 3 - (t - u)] * x[:, u, 0] for u in reached)
        torch.testing.assert_close(out[:, t], F.silu(total))


def test_channels_come_group_after_group_and_go_section_after_section() -> None:
    names = ["value0", "value1", "b", "c"]
    x, weight, bias = inputs(1, 3, 2, (2, 1, 1), 2)
    out = causal_conv(x, weight, bias, (2, 1, 1))
    came = [(group, name) for group in range(2) for name in names]
    went = [(0, "value0"), (0, "value1"), (1, "value0"), (1, "value1"), (0, "b"), (1, "b"), (0, "c"), (1, "c")]
    for place, channel in enumerate(went):
        number = came.index(channel)
        alone = causal_conv(x.flatten(2)[..., None, number, None], weight[number, None], bias[number, None], (1,))
        torch.testing.assert_close(out[..., place], alone[..., 0])


@pytest.mark.parametrize(
    ("batch", "tokens", "groups", "sections", "reach"),
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
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_kernels_give_what_torch_gives(
    batch: int, tokens: int, groups: int, sections: tuple[int, ...], reach: int, size: float, device: torch.device
) -> None:
    tensors = inputs(batch, tokens, groups, sections, reach, size)
    exact = with_gradients(causal_conv_reference, [one.double() for one in tensors], sections)
    ours = with_gradients(causal_conv_triton, [one.to(device) for one in tensors], sections)
    for one, wanted in zip(ours, exact, strict=True):
        assert one.shape == wanted.shape
        assert (one.cpu() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_kernels_take_a_slice_in_bf16_with_weights_in_fp32(device: torch.device) -> None:
    sections = (10, 5, 5)
    x, weight, bias = (one.to(device) for one in inputs(2, 9, 2, sections, 4))
    wide = torch.cat((x, x, x), dim=-1).bfloat16()
    piece = wide[..., 20:40]
    ours = with_gradients(causal_conv_triton, [piece, weight, bias], sections)
    exact = with_gradients(causal_conv_reference, [one.double().cpu() for one in (piece, weight, bias)], sections)
    assert [one.dtype for one in ours] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for one, wanted in zip(ours, exact, strict=True):
        assert (one.cpu().double() - wanted).norm() / wanted.norm() < 2**-7  # a bf16 number; the interpreter cuts off
