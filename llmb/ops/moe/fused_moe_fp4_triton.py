"""MoE GEMM with NVFP4 or MXFP4 weights (`nvfp4.py`, `mxfp4.py`) and unquantized activations, in Triton.

Weights are dequantized in registers, tile by tile, two at a time: exponent and mantissa of a code are shifted to where
bf16 has them, and one multiplication by the scale corrects the exponents, exactly. So weights take a quarter of the
memory of bf16, also on GPUs without 4-bit tensor cores. They are the left operand, which the tensor cores take from
registers, and swizzled (`e2m1.py`) so that a thread loads words with exactly the pairs that it holds there; the output
tile is transposed.

Dequantizing in registers repeats for every block of rows. With many blocks of an expert it is faster to write its
MXFP4 weights to memory in bf16 first, once for all of them, and to leave the GEMM to `_moe_gemm_kernel`.

Shapes: as in `fused_moe_triton.py`; O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.device_capabilities import capabilities
from llmb.ops.dispatch import INTERPRETED
from llmb.ops.moe.align_triton import AlignedBlocks, MoEGemmConfig, grouped_pids
from llmb.ops.moe.expert_weights import FP4_GROUPS, ExpertWeights
from llmb.ops.quant.e2m1 import SWIZZLE_GROUP

CONFIGS = {
    16: MoEGemmConfig(128, 64, 4, 4, 1),
    32: MoEGemmConfig(128, 64, 4, 4, 1, maxnreg=96),
    64: MoEGemmConfig(128, 64, 8, 4, 8),
    128: MoEGemmConfig(128, 64, 8, 3, 8, maxnreg=128),  # one of two programs computes while one dequantizes
}
WIDEN_PAIRS = 384  # of an expert under balanced load, from which its weights are widened first
WIDEN_BLOCK_ROWS, WIDEN_BLOCK_K, WIDEN_WARPS = 8, 1024, 8
ON_CPU = tl.constexpr(INTERPRETED)
SWIZZLED = tl.constexpr(SWIZZLE_GROUP)  # values in four words
# bf16 has a bias of 127, e2m1 of 1: the correction is 2^126. With a scale of up to 448 that would overflow, so a factor
# of 2^8 is applied at the end. Scales of MXFP4 are powers of two of any size: there half of it is.
EARLY_FACTOR, LATE_FACTOR = tl.constexpr(2.0**118), tl.constexpr(2.0**8)
MX_EARLY_EXPONENT, MX_LATE_FACTOR = tl.constexpr(64), tl.constexpr(2.0**62)


def _pair_ptx(pair: int) -> str:
    """PTX of one pair of codes: to sign, exponent and mantissa of bf16, times its scale (operand 9 or 10)."""

    def shift(bits: int) -> str:
        return f"{'shl' if bits > 0 else 'shr'}.b32 t, $8, {abs(bits)};"

    return (
        f"{shift(6 - 4 * pair)} and.b32 m, t, 0x01C001C0; {shift(12 - 4 * pair)} lop3.b32 m, t, 0x80008000, m, 0xEA;"
        f" fma.rn.bf16x2 m, m, ${9 + pair // 2}, z; mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, m;"
    )


_WORD_TO_BF16 = tl.constexpr(
    "{ .reg .b32 t, m, z; mov.b32 z, 0x80008000; " + " ".join(_pair_ptx(pair) for pair in range(4)) + " }"
)


@triton.jit
def _code_value(word, SHIFT: tl.constexpr):
    """Value of a code over its correction, in fp32."""
    code = word >> SHIFT
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _per_word(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat scales for the four words of 32 values."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, 4)), (ROWS, GROUPS * 4))


@triton.jit
def _dequantize(word, first, second, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return values over the late factor [ROWS, 32 * GROUPS]; the first 16 and second 16 of each 32 have own scales."""
    first, second = _per_word(first, ROWS, GROUPS), _per_word(second, ROWS, GROUPS)
    if ON_CPU:
        a0, a1 = _code_value(word, 0) * first, _code_value(word, 16) * first
        b0, b1 = _code_value(word, 4) * first, _code_value(word, 20) * first
        c0, c1 = _code_value(word, 8) * second, _code_value(word, 24) * second
        d0, d1 = _code_value(word, 12) * second, _code_value(word, 28) * second
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
            _WORD_TO_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [word, _twice_bf16(first), _twice_bf16(second)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    even, odd = tl.join(tl.join(a0, a1), tl.join(c0, c1)), tl.join(tl.join(b0, b1), tl.join(d0, d1))
    # Dimensions: row, group, thread, member of a pair, pair // 2, pair % 2.
    values = tl.reshape(tl.join(even, odd), (ROWS, GROUPS, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 1, 4, 5, 2, 3)), (ROWS, GROUPS * SWIZZLED))


@triton.jit
def _twice_bf16(x):
    """Bits of an fp32 number that bf16 holds exactly, as two bf16 numbers in one word."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits & -65536) | ((bits >> 16) & 65535)


@triton.jit
def _scales(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, IS_MXFP4: tl.constexpr):
    """Return the scales of the first and second 16 of each 32 values in fp32, times the early factor."""
    if IS_MXFP4:  # a scale is the exponent of an fp32 number
        exponent = tl.minimum(scale.to(tl.int32) + MX_EARLY_EXPONENT, 255)
        power = (exponent << 23).to(tl.float32, bitcast=True)
        return power, power
    elif (
        scale.dtype == tl.uint8
    ):  # e4m3 without its sign: shifted to the exponent of fp16, it is a number 256 times less
        number = (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.split(tl.reshape(number * (EARLY_FACTOR * 256), (ROWS, GROUPS, 2)))
    else:
        return tl.split(tl.reshape(scale.to(tl.float32) * EARLY_FACTOR, (ROWS, GROUPS, 2)))


@triton.jit(do_not_specialize=["pairs", "num_blocks"])
def _moe_gemm_fp4_kernel(
    x, weight, scales, weight_scales_2, bias, out, topk_weights, sorted_token_ids, expert_ids, pairs, num_blocks,
    outputs, inputs,
    TOP_K: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr,
    IS_MXFP4: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // TOP_K] @ weight[expert].T + bias[expert] for a block of pairs of one expert."""
    pid_m, pid_n = grouped_pids(tl.program_id(0), num_blocks, outputs, BLOCK_N, GROUP_M)
    expert = tl.load(expert_ids + pid_m).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = pair < pairs
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    output = expert * outputs + column % outputs  # columns beyond the last are computed from others and never stored
    k, word, group = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 8), tl.arange(0, BLOCK_K // GROUP)
    x_ptrs = x + (pair // TOP_K)[None, :] * inputs + k[:, None]
    weight_ptrs = weight + output[:, None] * (inputs // 8) + word[None, :]
    scale_ptrs = scales + output[:, None] * (inputs // GROUP) + group[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if EVEN_K:
            x_block = tl.load(x_ptrs, mask=valid[None, :], other=0.0)
            packed = tl.load(weight_ptrs)
            scale = tl.load(scale_ptrs)
        else:
            x_block = tl.load(x_ptrs, mask=valid[None, :] & (start + k < inputs)[:, None], other=0.0)
            packed = tl.load(weight_ptrs, mask=(start + 8 * word < inputs)[None, :], other=0)
            scale = tl.load(scale_ptrs, mask=(start + GROUP * group < inputs)[None, :], other=0.0)
        first, second = _scales(scale, BLOCK_N, BLOCK_K // SWIZZLED, IS_MXFP4)
        weight_block = _dequantize(packed, first, second, BLOCK_N, BLOCK_K // SWIZZLED).to(x.dtype.element_ty)
        acc = tl.dot(weight_block, x_block, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K // 8
        scale_ptrs += BLOCK_K // GROUP
    if IS_MXFP4:
        acc *= MX_LATE_FACTOR
    else:
        acc *= (tl.load(weight_scales_2 + output) * LATE_FACTOR)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + output).to(tl.float32)[:, None]
    if MUL_ROUTED_WEIGHT:
        acc *= tl.load(topk_weights + pair, mask=valid, other=0.0)[None, :]
    out_ptrs = out + pair[None, :] * outputs + column[:, None]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=valid[None, :] & (column < outputs)[:, None])


@triton.jit
def _moe_widen_mxfp4_kernel(
    weight, scales, out, rows, inputs,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the values of a tile of packed weights; rows are the outputs of all experts."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = tl.program_id(1) * BLOCK_K
    k, word = start + tl.arange(0, BLOCK_K), start // 8 + tl.arange(0, BLOCK_K // 8)
    group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
    valid = (row < rows)[:, None]
    packed_ptrs = weight + row[:, None] * (inputs // 8) + word[None, :]
    scale_ptrs = scales + row[:, None] * (inputs // GROUP) + group[None, :]
    packed = tl.load(packed_ptrs, mask=valid & (8 * word < inputs)[None, :], other=0)
    scale = tl.load(scale_ptrs, mask=valid & (GROUP * group < inputs)[None, :], other=0)
    first, second = _scales(scale, BLOCK_ROWS, BLOCK_K // SWIZZLED, True)
    values = _dequantize(packed, first, second, BLOCK_ROWS, BLOCK_K // SWIZZLED).to(tl.float32) * MX_LATE_FACTOR
    values = values.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * inputs + k[None, :], values, mask=valid & (k < inputs)[None, :])


def widens_first(weight: ExpertWeights, pairs: int, experts: int) -> bool:
    """Return whether a GEMM of so many pairs over all `experts` is faster with weights that are widened before it."""
    return weight.format == "mxfp4" and pairs >= WIDEN_PAIRS * experts


def widen(weight: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Return MXFP4 weights unquantized; products of e2m1 values and powers of two are exact in bf16."""
    experts, outputs, _ = weight.values.shape
    rows, inputs = experts * outputs, weight.inputs
    out_EOI = torch.empty(experts, outputs, inputs, dtype=dtype, device=weight.values.device)
    _moe_widen_mxfp4_kernel[triton.cdiv(rows, WIDEN_BLOCK_ROWS), triton.cdiv(inputs, WIDEN_BLOCK_K)](
        weight.values.view(torch.int32), weight.scales, out_EOI, rows, inputs,
        GROUP=FP4_GROUPS[weight.format], BLOCK_ROWS=WIDEN_BLOCK_ROWS, BLOCK_K=WIDEN_BLOCK_K, num_warps=WIDEN_WARPS,
    )  # fmt: skip
    return ExpertWeights("plain", out_EOI, bias=weight.bias)


def fp4_gemm(
    x: Tensor,
    weight: ExpertWeights,
    blocks: AlignedBlocks,
    pairs: int,
    top_k: int,
    dtype: torch.dtype,
    topk_weights: Tensor | None = None,
) -> Tensor:
    """See `fused_moe_triton.moe_gemm`."""
    outputs, inputs = weight.values.shape[1], weight.inputs
    out_MO = torch.empty(pairs, outputs, dtype=dtype, device=x.device)
    config, num_blocks = CONFIGS[blocks.block_size], len(blocks.expert_ids_T)
    gpu, scales = capabilities(x.device), weight.scales
    if scales is not None and gpu.compute is not None and not gpu.supports("fp8_gemm"):  # Triton has no e4m3 there
        scales = scales.view(torch.uint8)
    _moe_gemm_fp4_kernel[num_blocks * triton.cdiv(outputs, config.block_n),](
        x.contiguous(), weight.values.view(torch.int32), scales, weight.scales_2, weight.bias, out_MO,
        topk_weights, blocks.sorted_token_ids_P, blocks.expert_ids_T, pairs, num_blocks, outputs, inputs,
        TOP_K=top_k, MUL_ROUTED_WEIGHT=topk_weights is not None, EVEN_K=inputs % config.block_k == 0,
        GROUP=FP4_GROUPS[weight.format], IS_MXFP4=weight.format == "mxfp4", HAS_BIAS=weight.bias is not None,
        BLOCK_M=blocks.block_size, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg,
    )  # fmt: skip
    return out_MO
