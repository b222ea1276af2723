"""The matrix product of training: summed in fp32, written where it is wanted, added to what is there.

    y_NM = multiply(x_NK, weight_MK.T)                                      # in the format of x
    multiply(dy_NM.T, x_NK, out=grad_MK, onto=grad_MK)                      # adds to a gradient, which may be wider
    multiply(act_NK, weight_MK.T, out=y_NM, onto=resid_NM)                  # y = resid + act @ weight.T
    multiply(x8_NK, weight8_MK.T, dtype=torch.bfloat16, scales=(s, t))      # of 8-bit values, scaled back

On a GPU it is cuBLAS with the algorithm that is fastest there (`cublas_lt.py`), as an operation of its own, so that
traces have its sizes and rehearsals its FLOPs: rounded once, with what is added. Anywhere else, for fp32, and where it
is too small to matter, it is torch's, and is added in a pass of its own.

`scales` are fp32 scalars on the device, one a matrix. `fast` lets the GPU add 8-bit products with fewer bits, enough
going forward.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import is_dry_run, on_gpu
from llmb.ops.gemm.cublas_lt import Scales, planned, takes

NARROW = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
WORTH_TRYING = 1e10  # multiplications: 30 us of an H200

_library = torch.library.Library("llmb", "DEF")
_library.define(
    "multiply(Tensor left, Tensor right, Tensor(a!) out, Tensor? onto, Tensor? left_scale, Tensor? right_scale, "
    "bool fast) -> ()"
)
OPERATION = torch.ops.llmb.multiply


def multiply(
    left_MK: Tensor,
    right_KN: Tensor,
    *,
    out: Tensor | None = None,
    onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
    fast: bool = False,
) -> Tensor:
    """left @ right, and `onto`, which may be `out`, where there is one; in the format of `out`, or `dtype`."""
    dtype = out.dtype if out is not None else dtype or left_MK.dtype
    if not (on_gpu(left_MK) and left_MK.dtype in NARROW and _is_cublas(left_MK, right_KN, out, onto)):
        return _torch_multiply(left_MK, right_KN, out, onto, dtype, scales, fast)
    if out is None:
        out = torch.empty(len(left_MK), right_KN.shape[1], dtype=dtype, device=left_MK.device)
    OPERATION(left_MK, right_KN, out, onto, *(scales or (None, None)), fast)
    return out


def _is_cublas(left_MK: Tensor, right_KN: Tensor, *others: Tensor | None) -> bool:
    if is_dry_run():
        return True
    return left_MK.numel() * right_KN.shape[1] >= WORTH_TRYING and takes(
        left_MK, right_KN, *(x for x in others if x is not None)
    )


def _torch_multiply(
    left_MK: Tensor,
    right_KN: Tensor,
    out: Tensor | None,
    onto: Tensor | None,
    dtype: torch.dtype,
    scales: Scales | None,
    fast: bool,
) -> Tensor:
    if onto is None:
        return _torch_product(left_MK, right_KN, out, dtype, scales, fast)
    made_MN = _torch_product(left_MK, right_KN, None if onto is out else out, dtype, scales, fast)
    return out.add_(made_MN) if onto is out and out is not None else made_MN.add_(onto)


def _torch_product(
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
        made_MN = ((left_MK.float() @ right_KN.float()) * (scales[0] * scales[1])).to(dtype)
        return made_MN if out is None else out.copy_(made_MN)
    if left_MK.dtype == dtype:
        return torch.mm(left_MK, right_KN, out=out)
    if on_gpu(left_MK):
        return torch.mm(left_MK, right_KN, out_dtype=dtype, out=out)
    return torch.mm(left_MK.to(dtype), right_KN.to(dtype), out=out)


def _on_cuda(
    left_MK: Tensor,
    right_KN: Tensor,
    out: Tensor,
    onto: Tensor | None,
    left_scale: Tensor | None,
    right_scale: Tensor | None,
    fast: bool,
) -> None:
    scales = None if left_scale is None or right_scale is None else (left_scale, right_scale)
    planned(left_MK, right_KN, out, onto, scales, fast)(left_MK, right_KN, out, onto, scales)


_library.impl("multiply", _on_cuda, "CUDA")
_library.impl("multiply", lambda *_arguments: None, "Meta")
