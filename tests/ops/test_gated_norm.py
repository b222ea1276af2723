"""The gated norm: plain torch against its definition, and the kernels against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.norm.gated_norm import gated_norm, gated_norm_reference

pytest.importorskip("triton")
from llmb.ops.norm.gated_norm_triton import gated_norm_triton


def inputs(batch: int, tokens: int, groups: int, width: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, tokens, groups * width), (batch, tokens, groups, width), (groups * width,))
    return [torch.randn(*shape, generator=generator) * size for shape in shapes]


def with_gradients(form, tensors: list[Tensor], eps: float) -> list[Tensor]:
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = form(*tensors, eps)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def test_each_group_of_channels_has_unit_size_before_its_weights() -> None:
    y, gate, weight = inputs(2, 3, 3, 4)
    out = gated_norm(y, gate, weight, 1e-6)
    for group in range(3):
        part = slice(4 * group, 4 * group + 4)
        gated = y[..., part] * F.silu(gate[:, :, group])
        wanted = gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight[part]
        torch.testing.assert_close(out[..., part], wanted)


@pytest.mark.parametrize(
    ("batch", "tokens", "groups", "width"), [(2, 5, 2, 12), (1, 1, 1, 64), (1, 37, 2, 10), (1, 3, 3, 2)]
)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_kernels_give_what_torch_gives(
    batch: int, tokens: int, groups: int, width: int, size: float, device: torch.device
) -> None:
    tensors = inputs(batch, tokens, groups, width, size)
    exact = with_gradients(gated_norm_reference, [one.double() for one in tensors], 1e-5)
    ours = with_gradients(gated_norm_triton, [one.to(device) for one in tensors], 1e-5)
    for one, wanted in zip(ours, exact, strict=True):
        assert one.shape == wanted.shape
        assert (one.cpu() - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_kernels_take_a_slice_in_bf16_with_weights_in_fp32(device: torch.device) -> None:
    y, gate, weight = (one.to(device) for one in inputs(2, 5, 2, 20))
    wide = torch.cat((gate, gate), dim=-1).bfloat16()
    tensors = [y.bfloat16(), wide[..., 20:], weight]
    ours = with_gradients(gated_norm_triton, tensors, 1e-5)
    exact = with_gradients(gated_norm_reference, [one.double().cpu() for one in tensors], 1e-5)
    assert [one.dtype for one in ours] == [torch.bfloat16] * 3 + [torch.float32]
    for one, wanted in zip(ours, exact, strict=True):
        assert (one.cpu().double() - wanted).norm() / wanted.norm() < 2**-7  # a bf16 number; the interpreter cuts off
