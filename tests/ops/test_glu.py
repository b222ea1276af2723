"""SwiGLU and GeGLU into fp8: their reference against a cast; kernels: op_cases/activation.py."""

import pytest
import torch
from op_cases.activation import fp8, fp8_backward
from torch import Tensor

from llmb.ops.activation.activation import glu, glu_backward
from llmb.ops.activation.glu_fp8 import glu_backward_fp8, glu_fp8
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2

pytest.importorskip("triton")
CPU = torch.device("cpu")


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale.reciprocal()).clamp(-largest, largest).to(dtype).float()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_fp8_reference_is_glu_and_a_cast(activation: str) -> None:
    (h, _, amax, rows, columns), _ = fp8(torch.Generator(), CPU, 20, 24, "rc")
    glu_fp8(h, activation, amax, rows, columns)
    act = glu(h.float(), activation)
    expected = to_fp8(act, amax.scale, E4M3)
    assert torch.equal(rows.float(), expected)
    assert torch.equal(columns[:, :20].float(), expected.T)
    assert amax.amax == act.abs().max()

    arguments, _ = fp8_backward(torch.Generator(), CPU, 20, 24, activation=activation)
    dact, h, _, dh_amax, dh_rows, dh_columns, act_amax, act_columns = arguments
    before = dact.clone(), h.clone()
    glu_backward_fp8(*arguments)
    assert torch.equal(dact, before[0])
    assert torch.equal(h, before[1])
    act, dh = glu(h.float(), activation), h.float()
    assert torch.equal(act_columns[:, :20].float(), to_fp8(act, act_amax.scale, E4M3).T)
    glu_backward(dact.float(), dh, activation)
    expected = to_fp8(dh, dh_amax.scale, E5M2)
    assert torch.equal(dh_rows.float(), expected)
    assert torch.equal(dh_columns[:, :20].float(), expected.T)
    assert dh_amax.amax == dh.abs().max()
    assert act_amax.amax == act.abs().max()


def test_backward_takes_all_outputs_or_none(device: torch.device) -> None:
    arguments, _ = fp8_backward(torch.Generator(), device, 6, 24)
    with pytest.raises(AssertionError, match="all outputs or none"):
        glu_backward_fp8.triton(*arguments[:5], None, *arguments[6:])
