"""Matmul for training: fp32 accumulation, optional output buffer and addend, bf16 or fp8 operands.

    y_NM = matmul(x_NK, weight_MK.T)                                        # in the dtype of x
    matmul(dy_NM.T, x_NK, out=grad_MK, addend=grad_MK)                      # accumulates a gradient, possibly in fp32
    matmul(act_NK, weight_MK.T, out=y_NM, addend=residual_NM)               # y = residual + act @ weight.T
    matmul(x8_NK, weight8_MK.T, dtype=torch.bfloat16, scales=(s, t))        # fp8 operands, dequantized

On a GPU it is cuBLASLt with the fastest algorithm (`cublas_lt.py`), as a torch op of its own, so that traces have its
sizes and dry runs its FLOPs; the result is rounded once, addend included. Anywhere else, for fp32, and for sizes too
small to matter, it is torch.mm followed by a separate addition.

`scales` are fp32 scalars on the device, one per matrix. `fast` enables fp8 fast accumulation (fewer accumulator bits),
which is enough in the forward pass.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import is_dry_run, on_gpu
from llmb.ops.gemm.cublas_lt import Scales, plan_for, supports

CUBLAS_DTYPES = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
MIN_CUBLAS_MACS = 1e10  # multiply-adds: 30 us on an H200

_library = torch.library.Library("llmb", "DEF")
_library.define(
    "matmul(Tensor left, Tensor right, Tensor(a!) out, Tensor? addend, Tensor? left_scale, Tensor? right_scale, "
    "bool fast) -> ()"
)
OPERATION = torch.ops.llmb.matmul


def matmul(
    left_MK: Tensor,
    right_KN: Tensor,
    *,
    out: Tensor | None = None,
    addend: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
    fast: bool = False,
) -> Tensor:
    """Return left @ right plus `addend`, which may be `out`, in the dtype of `out`, or `dtype`."""
    dtype = out.dtype if out is not None else dtype or left_MK.dtype
    if not (on_gpu(left_MK) and left_MK.dtype in CUBLAS_DTYPES and _uses_cublas(left_MK, right_KN, out, addend)):
        return _torch_mm_add(left_MK, right_KN, out, addend, dtype, scales, fast)
    if out is None:
        out = torch.empty(len(left_MK), right_KN.shape[1], dtype=dtype, device=left_MK.device)
    OPERATION(left_MK, right_KN, out, addend, *(scales or (None, None)), fast)
    return out


def _uses_cublas(left_MK: Tensor, right_KN: Tensor, *outputs: Tensor | None) -> bool:
    if is_dry_run():
        return True
    return left_MK.numel() * right_KN.shape[1] >= MIN_CUBLAS_MACS and supports(
        left_MK, right_KN, *(x for x in outputs if x is not None)
    )


def _torch_mm_add(
    left_MK: Tensor,
    right_KN: Tensor,
    out: Tensor | None,
    addend: Tensor | None,
    dtype: torch.dtype,
    scales: Scales | None,
    fast: bool,
) -> Tensor:
    if addend is None:
        return _torch_mm(left_MK, right_KN, out, dtype, scales, fast)
    product_MN = _torch_mm(left_MK, right_KN, None if addend is out else out, dtype, scales, fast)
    return out.add_(product_MN) if addend is out and out is not None else product_MN.add_(addend)


def _torch_mm(
    left_MK: Tensor,
    right_KN: Tensor,
    out: Tensor | None,
    dtype: torch.dtype,
    scales: Scales | None,
    fast: bool,
) -> Tensor:
    if scales is not None and on_gpu(left_MK):
        return torch._scaled_mm(left_MK, right_KN, *scales, out_dtype=dtype, use_fast_accum=fast, out=out)
    if scales is not None:
        product_MN = ((left_MK.float() @ right_KN.float()) * (scales[0] * scales[1])).to(dtype)
        return product_MN if out is None else out.copy_(product_MN)
    if left_MK.dtype == dtype:
        return torch.mm(left_MK, right_KN, out=out)
    if on_gpu(left_MK):
        return torch.mm(left_MK, right_KN, out_dtype=dtype, out=out)
    return torch.mm(left_MK.to(dtype), right_KN.to(dtype), out=out)


def _matmul_cuda(
    left_MK: Tensor,
    right_KN: Tensor,
    out: Tensor,
    addend: Tensor | None,
    left_scale: Tensor | None,
    right_scale: Tensor | None,
    fast: bool,
) -> None:
    scales = None if left_scale is None or right_scale is None else (left_scale, right_scale)
    plan_for(left_MK, right_KN, out, addend, scales, fast)(left_MK, right_KN, out, addend, scales)


_library.impl("matmul", _matmul_cuda, "CUDA")
_library.impl("matmul", lambda *_args: None, "Meta")
