"""RoPE in place: the reference against the version with a new tensor; its kernel: op_cases/rope.py."""

import torch
from op_cases.rope import heads
from torch import Tensor

from llmb.ops.rope.rope import apply_rope, apply_rope_, apply_rope_out

CPU = torch.device("cpu")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Heads inside wider rows, cosine, sine."""
    (_, x, cos, sin, _), _ = heads(torch.Generator(), CPU, 3, 4, 10)
    return x, cos, sin


def test_reference_in_place_and_inverse() -> None:
    x, cos, sin = inputs()
    before, beside = x.clone(), x._base[:, [0, -1]].clone()
    apply_rope_(x, cos, sin)
    assert torch.equal(x, apply_rope(before, cos, sin))
    apply_rope_out.reference(x, x, cos, sin, inverse=True)
    torch.testing.assert_close(x, before)
    assert torch.equal(x._base[:, [0, -1]], beside)


def test_bf16_is_rounded_once() -> None:
    x, cos, sin = inputs()
    x = x.bfloat16()
    exact = apply_rope(x.double(), cos.double(), sin.double())
    apply_rope_out.reference(x, x, cos, sin)
    assert ((x.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
