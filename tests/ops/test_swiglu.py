"""SwiGLU, plain and into fp8: references against autograd and a cast; kernels: op_cases/activation.py."""

import pytest
import torch
import torch.nn.functional as F
from op_cases.activation import fp8, fp8_backward, in_place
from torch import Tensor

from llmb.ops.activation.activation import swiglu, swiglu_backward
from llmb.ops.activation.swiglu_fp8 import swiglu_backward_fp8, swiglu_fp8
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2

pytest.importorskip("triton")
CPU = torch.device("cpu")


def test_reference_matches_autograd() -> None:
    (dact, gate, _, up, *_), _ = in_place(torch.Generator(), CPU, 5, 7, 3.0, dtype=torch.float64)
    h = torch.cat((gate, up), dim=-1)
    leaf = h.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    (expected_dh,) = torch.autograd.grad((expected * dact).sum(), leaf)
    torch.testing.assert_close(swiglu(h), expected.detach())
    out = torch.empty(5, 7, dtype=torch.float64)
    assert swiglu(h, out=out) is out
    assert torch.equal(swiglu(h), out)
    swiglu_backward(dact, h)
    torch.testing.assert_close(h, expected_dh)
    torch.testing.assert_close(dact, expected.detach())


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale.reciprocal()).clamp(-largest, largest).to(dtype).float()


def test_fp8_reference_is_swiglu_and_a_cast() -> None:
    (h, amax, rows, columns), _ = fp8(torch.Generator(), CPU, 20, 24, "rc")
    swiglu_fp8(h, amax, rows, columns)
    act = swiglu(h.float())
    expected = to_fp8(act, amax.scale, E4M3)
    assert torch.equal(rows.float(), expected)
    assert torch.equal(columns[:, :20].float(), expected.T)
    assert amax.amax == act.abs().max()

    arguments, _ = fp8_backward(torch.Generator(), CPU, 20, 24)
    dact, h, dh_amax, dh_rows, dh_columns, act_amax, act_columns = arguments
    before = dact.clone(), h.clone()
    swiglu_backward_fp8(*arguments)
    assert torch.equal(dact, before[0])
    assert torch.equal(h, before[1])
    act, dh = swiglu(h.float()), h.float()
    assert torch.equal(act_columns[:, :20].float(), to_fp8(act, act_amax.scale, E4M3).T)
    swiglu_backward(dact.float(), dh)
    expected = to_fp8(dh, dh_amax.scale, E5M2)
    assert torch.equal(dh_rows.float(), expected)
    assert torch.equal(dh_columns[:, :20].float(), expected.T)
    assert dh_amax.amax == dh.abs().max()
    assert act_amax.amax == act.abs().max()


def test_backward_takes_all_outputs_or_none(device: torch.device) -> None:
    arguments, _ = fp8_backward(torch.Generator(), device, 6, 24)
    with pytest.raises(AssertionError, match="all outputs or none"):
        swiglu_backward_fp8.triton(*arguments[:4], None, *arguments[5:])
