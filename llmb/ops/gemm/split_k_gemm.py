"""fp8 linear layers of a few dozen tokens by a split-K GEMM: bound by reading the weight.

    weight = SplitKWeight.of(values_OK, scales_O)
    out_NO = split_k_gemm(PerTokenFp8(values_NK, scales_N1), weight, torch.bfloat16)

With few tokens a library's GEMM has a tile of outputs per multiprocessor and leaves most of them idle: 4,096 outputs in
tiles of 128 are 32. Here the inputs of a tile are split among programs too, so that all of the GPU reads. Splits are
added in their order, so equal inputs give equal bits. On an H200 the four GEMMs of a layer of Llama 8b take 67 us with
4 tokens, 72 with 32 and 93 with 82; by torch._scaled_mm 101 to 104 (`bench/split_k_gemm.py`).

Shapes: N tokens, K inputs, O outputs, T tiles of outputs.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.device_capabilities import capabilities
from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import PerTokenFp8

MAX_TOKENS = 128
INPUT_MULTIPLE = 128
BLOCK_O = 64  # outputs of the smallest tile
SHARED_MEMORY_BYTES = 164 << 10  # of the largest tiles


class SplitKWeight(NamedTuple):
    """fp8 values with a scale for each output, and counters of finished splits, zero between two GEMMs."""

    values_OK: Tensor
    scales_O: Tensor
    arrivals_T: Tensor

    @classmethod
    def of(cls, values_OK: Tensor, scales_O: Tensor) -> Self:
        """Allocate the counters, which a CUDA graph could not set to zero."""
        tiles = -(-len(values_OK) // BLOCK_O)
        return cls(values_OK, scales_O, torch.zeros(tiles, dtype=torch.int32, device=values_OK.device))


@op
def split_k_gemm(x: PerTokenFp8, weight: SplitKWeight, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T, scaled per token and per output."""
    return (F.linear(x.values.float(), weight.values_OK.float()) * (x.scales * weight.scales_O)).to(dtype)


def takes_split_k_gemm(x: PerTokenFp8) -> bool:
    """Return whether a linear layer of these activations should be computed by `split_k_gemm`."""
    tokens, inputs = x.values.shape
    if not (x.values.is_cuda and 0 < tokens <= MAX_TOKENS and inputs % INPUT_MULTIPLE == 0):
        return False
    return (capabilities(x.values.device).shared_memory_bytes or 0) >= SHARED_MEMORY_BYTES
