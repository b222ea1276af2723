"""Activation functions for all kernels, and the Triton kernels of an MLP's activation: one program takes one block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4  # 16 elements a thread of each tensor: two loads of 16 bytes in bf16


@triton.jit
def activation_value(x, ACTIVATION: tl.constexpr):
    """silu, gelu (tanh approximation) or squared_relu of x."""
    value, _ = activation_value_and_grad(x, ACTIVATION)
    return value


@triton.jit
def activation_value_and_grad(x, ACTIVATION: tl.constexpr):
    """The activation, and its derivative."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(x)
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    elif ACTIVATION == "gelu":  # tanh(y) = 2 * sigmoid(2 y) - 1
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        saturated = (sigmoid == 0) | (sigmoid == 1)  # where the cube may be infinite
        bend = sigmoid * (1 - sigmoid) * 1.5957691216057308 * x * (1 + 0.134145 * x * x)
        return x * sigmoid, sigmoid + tl.where(saturated, 0.0, bend)
    else:
        relu = tl.maximum(x, 0.0)
        relu = tl.where(x == x, relu, x)  # NaN stays NaN
        return relu * relu, 2 * relu


@triton.jit
def swiglu_value_and_grads(dact, gate, up, sigmoid):
    """dgate, dup and silu(gate) * up; `sigmoid` is that of the gate."""
    silu = gate * sigmoid
    return dact * up * sigmoid * (1 + gate * (1 - sigmoid)), dact * silu, silu * up


@triton.jit
def _activation(x_ptr, up_ptr, out_ptr, n, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    act = activation_value(tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        act *= tl.load(up_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, act.to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def _activation_backward(
    dact_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, n, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dact = tl.load(dact_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    act, grad = activation_value_and_grad(tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32), ACTIVATION)
    dx = dact * grad
    if GATED:
        dx *= tl.load(up_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        tl.store(dup_ptr + i, (dact * act).to(dup_ptr.dtype.element_ty), mask=i < n)
    tl.store(dx_ptr + i, dx.to(dx_ptr.dtype.element_ty), mask=i < n)


def activation_forward_triton(x: Tensor, activation: str, up: Tensor | None) -> Tensor:
    """Launch the kernel of `activation.activation_forward`."""
    x, n = x.contiguous(), x.numel()
    gate = x if up is None else up.contiguous()
    out = torch.empty_like(x)
    if n:
        _activation[(triton.cdiv(n, BLOCK),)](
            x, gate, out, n, ACTIVATION=activation, GATED=up is not None, BLOCK=BLOCK, num_warps=WARPS
        )
    return out


def activation_backward_triton(
    dact: Tensor, x: Tensor, activation: str, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel of `activation.activation_backward`."""
    dact, x, n = dact.contiguous(), x.contiguous(), x.numel()
    gate = x if up is None else up.contiguous()
    dx, dup = torch.empty_like(x), None if up is None else torch.empty_like(gate)
    if n:
        _activation_backward[(triton.cdiv(n, BLOCK),)](
            dact, x, gate, dx, dx if dup is None else dup, n,
            ACTIVATION=activation, GATED=up is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return dx, dup
