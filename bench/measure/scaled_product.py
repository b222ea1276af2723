"""Library GEMM of fp8 matrices with many scales, as benches time it: the scales are ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmb.ops.gemm.scaled_matmul import scaled_matmul
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS


def scaled_product(left_NK: Tensor, right_MK: Tensor, recipe: str, blocks: bool = True) -> Callable[[], Tensor]:
    """Return left @ right.T in bf16, ready to be computed; `blocks`: the right one has the scales of a weight.

    With a scale a row it has fast accumulation, as others.
    """
    scaling, scales = VECTOR_SCALINGS[recipe](), []
    for matrix, weight in ((left_NK, False), (right_MK, blocks)):
        layouts = scaling.empty(*matrix.shape, matrix.device, rows=True, weight=weight)
        scales.append(layouts.row_scales.fill_(1.0))
    out_NM = torch.empty(len(left_NK), len(right_MK), device=left_NK.device, dtype=torch.bfloat16)
    return lambda: scaled_matmul((left_NK, scales[0]), (right_MK, scales[1]), out_NM, fast=True)
