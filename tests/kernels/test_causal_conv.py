"""The short convolution: torch's own against its definition, and the kernels against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.kernels.causal_conv import causal_conv, causal_conv_reference

pytest.importorskip("triton")
from llmb.kernels.causal_conv_triton import causal_conv_triton


def inputs(batch: int, tokens: int, channels: int, reach: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, tokens, channels), (channels, 1, reach), (channels,))
    return [torch.randn(*shape, generator=generator) * size for shape in shapes]


def with_gradients(form, tensors: list[Tensor]) -> list[Tensor]:
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = form(*tensors)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def test_each_token_is_the_silu_of_a_sum_over_the_last_few() -> None:
    x, weight, bias = inputs(2, 9, 5, 4)
    out = causal_conv(x, weight, bias)
    for t in range(9):
        reached = range(max(0, t - 3), t + 1)
        total = bias + sum(weight[:, 0, 3 - (t - u)] * x[:, u] for u in reached)
        torch.testing.assert_close(out[:, t], F.silu(total))


@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "reach"), [(2, 66, 70, 4), (1, 1, 3, 4), (1, 70, 8, 2), (3, 5, 16, 3), (1, 9, 4, 1)]
)
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_kernels_give_what_torch_gives(
    batch: int, tokens: int, channels: int, reach: int, size: float, device: torch.device
) -> None:
    exact = with_gradients(
        causal_conv_reference, [one.double() for one in inputs(batch, tokens, channels, reach, size)]
    )
    ours = with_gradients(causal_conv_triton, [one.to(device) for one in inputs(batch, tokens, channels, reach, size)])
    for one, wanted in zip(ours, exact, strict=True):
        assert one.shape == wanted.shape
        assert (one.cpu() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_kernels_take_a_slice_in_bf16_with_weights_in_fp32(device: torch.device) -> None:
    x, weight, bias = (one.to(device) for one in inputs(2, 9, 40, 4))
    wide = torch.cat((x, x, x), dim=-1).bfloat16()
    piece = wide[..., 40:80]
    ours = with_gradients(causal_conv_triton, [piece, weight, bias])
    exact = with_gradients(causal_conv_reference, [piece.double().cpu(), weight.double().cpu(), bias.double().cpu()])
    assert [one.dtype for one in ours] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for one, wanted in zip(ours, exact, strict=True):
        assert (one.cpu().double() - wanted).norm() / wanted.norm() < 2**-7  # a bf16 number; the interpreter cuts off
