"""Matmul of fp8 operands with a scale per row, per 128 values of a row, or per block of 128 x 128.

    scaled_matmul((x8.rows, x8.row_scales), (w8.rows, w8.row_scales), out_NM, addend=residual_NM)

Returns left @ right.T: both operands are contiguous along the sum, and the shape of their scales says what they are
(`llmb/ops/quant/scaled_fp8.py`). The right operand may have blocks, the left may not.

On a GPU it is cuBLAS through torch, as a torch op of its own, so that traces have its sizes and dry runs its FLOPs:
scales of rows on any GPU with fp8, groups and blocks on Hopper with CUDA 12.9 or later, which adds 128 products at a
time and the scaled partial sums in fp32. An addend is a pass of its own. Anywhere else the same values are multiplied
in fp32.

`fast` enables fast accumulation (fewer accumulator bits) with scales of rows; with groups there is none.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import on_gpu
from llmb.ops.quant.blockwise_quant import GROUP, SCALE_MULTIPLE, group_scales

Operand = tuple[Tensor, Tensor]  # values [n, K] and their scales

_library = torch.library.Library("llmb", "FRAGMENT")
_library.define(
    "scaled_matmul(Tensor left, Tensor right, Tensor(a!) out, Tensor left_scales, Tensor right_scales, bool fast) -> ()"
)
OPERATION = torch.ops.llmb.scaled_matmul


def scaled_matmul(
    left: Operand, right: Operand, out: Tensor, addend: Tensor | None = None, fast: bool = False
) -> Tensor:
    """Set `out` to left @ right.T plus `addend`, which may be `out`, and return it."""
    product = torch.empty_like(out) if addend is out else out
    if on_gpu(left[0]):
        OPERATION(left[0], right[0], product, left[1], right[1], fast)
    else:
        product.copy_(_reference(left, right))
    if addend is None:
        return out
    return out.add_(product if addend is out else addend)


def has_row_scales(left_scales: Tensor, right: Tensor, right_scales: Tensor) -> bool:
    """Return whether scales are those of rows; of rows of 128 values they are those of groups, too."""
    return left_scales.shape[1] == 1 and len(right_scales) == len(right)


def _reference(left: Operand, right: Operand) -> Tensor:
    if has_row_scales(left[1], *right):
        return (left[0].float() @ right[0].float().T) * (left[1] * right[1].T)
    return _dequantized(*left) @ _dequantized(*right).T


def _dequantized(values_NK: Tensor, scales: Tensor) -> Tensor:
    scales_NG = group_scales(scales, *values_NK.shape)
    return (values_NK.float().unflatten(1, (-1, GROUP)) * scales_NG[..., None]).flatten(1)


def _scaled_matmul_cuda(
    left_MK: Tensor, right_NK: Tensor, out_MN: Tensor, left_scales: Tensor, right_scales: Tensor, fast: bool
) -> None:
    if has_row_scales(left_scales, right_NK, right_scales):
        torch._scaled_mm(
            left_MK, right_NK.T, left_scales, right_scales.T, out_dtype=out_MN.dtype, use_fast_accum=fast, out=out_MN
        )
    elif padding := -len(left_MK) % SCALE_MULTIPLE:  # cuBLAS takes tokens in multiples of this
        padded = F.pad(left_MK.view(torch.uint8), (0, 0, 0, padding)).view(left_MK.dtype)
        scales = F.pad(left_scales.T, (0, padding)).contiguous().T
        padded_out = out_MN.new_empty(len(padded), len(right_NK))
        _block_matmul(padded, right_NK, padded_out, scales, right_scales)
        out_MN.copy_(padded_out[: len(left_MK)])
    else:
        _block_matmul(left_MK, right_NK, out_MN, left_scales, right_scales)


def _block_matmul(left_MK: Tensor, right_NK: Tensor, out_MN: Tensor, left_scales: Tensor, right_scales: Tensor) -> None:
    is_grouped = len(right_scales) == len(right_NK)
    recipe = F.ScalingType.BlockWise1x128 if is_grouped else F.ScalingType.BlockWise128x128
    torch._scaled_mm_v2(
        left_MK, right_NK.T, [left_scales], [F.ScalingType.BlockWise1x128.value], [],
        [right_scales if is_grouped else right_scales.T], [recipe.value], [], None, out_MN.dtype, out=out_MN,
    )  # fmt: skip


_library.impl("scaled_matmul", _scaled_matmul_cuda, "CUDA")
_library.impl("scaled_matmul", lambda *_args: None, "Meta")
