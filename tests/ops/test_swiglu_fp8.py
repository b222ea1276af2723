"""SwiGLU into fp8, forward and backward: the reference against `swiglu` and a cast, and layouts of the kernels."""

import pytest
import torch
from op_cases.quant import fp8_full, fp8_layouts, scale_amax
from torch import Tensor

from llmb.ops.activation.activation import swiglu, swiglu_backward
from llmb.ops.activation.swiglu_fp8 import swiglu_backward_fp8, swiglu_fp8
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, padded_tokens

pytest.importorskip("triton")


def inputs(n: int, f: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gradient of the activation, and gate beside up."""
    generator = torch.Generator().manual_seed(n + f)
    dact, h = torch.randn(n, f, generator=generator), torch.randn(n, 2 * f, generator=generator)
    return dact.bfloat16().to(device), h.bfloat16().to(device)


def backward_outputs(n: int, f: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of dh, columns of the activation."""
    return *fp8_layouts(device, n, 2 * f, "rc", E5M2), fp8_full(device, f, padded_tokens(n))  # type: ignore[return-value]


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale.reciprocal()).clamp(-largest, largest).to(dtype).float()


def test_reference_is_swiglu_and_a_cast() -> None:
    dact, h = inputs(20, 24, torch.device("cpu"))
    forward_amax, (rows, columns) = scale_amax(h.device, 0.02), fp8_layouts(h.device, 20, 24, "rc")
    swiglu_fp8(h, forward_amax, rows, columns)
    act = swiglu(h.float())
    expected = to_fp8(act, forward_amax.scale, E4M3)
    assert torch.equal(rows.float(), expected)
    assert torch.equal(columns[:, :20].float(), expected.T)
    assert forward_amax.amax == act.abs().max()

    dh_scale_amax, act_scale_amax = scale_amax(h.device, 1e-4), scale_amax(h.device, 0.02)
    before = dact.clone(), h.clone()
    dh_rows, dh_columns, act_columns = backward_outputs(20, 24, h.device)
    swiglu_backward_fp8(dact, h, dh_scale_amax, dh_rows, dh_columns, act_scale_amax, act_columns)
    assert torch.equal(dact, before[0])
    assert torch.equal(h, before[1])
    assert torch.equal(act_columns.float(), columns.float())
    dh = h.float()
    swiglu_backward(dact.float(), dh)
    expected = to_fp8(dh, dh_scale_amax.scale, E5M2)
    assert torch.equal(dh_rows.float(), expected)
    assert torch.equal(dh_columns[:, :20].float(), expected.T)
    assert dh_scale_amax.amax == dh.abs().max()
    assert act_scale_amax.amax == act.abs().max()


@pytest.mark.slow
def test_backward_layouts_have_the_same_values(device: torch.device) -> None:
    dact, h = inputs(300, 70, device)
    outputs = backward_outputs(300, 70, device)
    scales = scale_amax(device, 3e-4), scale_amax(device, 0.013)
    swiglu_backward_fp8.triton(dact, h, scales[0], outputs[0], outputs[1], scales[1], outputs[2])
    assert torch.equal(outputs[0].float(), outputs[1][:, :300].float().T)


def test_backward_takes_all_outputs_or_none(device: torch.device) -> None:
    dact, h = inputs(6, 24, device)
    scales, outputs = (scale_amax(device, 1.0), scale_amax(device, 1.0)), backward_outputs(6, 24, device)
    with pytest.raises(AssertionError, match="all outputs or none"):
        swiglu_backward_fp8.triton(dact, h, scales[0], outputs[0], None, scales[1], outputs[2])
