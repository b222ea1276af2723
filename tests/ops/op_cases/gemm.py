"""GEMMs for few tokens."""

import torch
from torch import Generator, bfloat16, device, dtype, float8_e4m3fn, float32

from llmb.ops.gemm.block_scaled_gemm import block_scaled_mm, quantize_blocks
from llmb.ops.gemm.skinny_gemm import InputNorm, SkinnyGemmWeight, skinny_gemm
from llmb.ops.gemm.split_k_gemm import SplitKWeight, split_k_gemm
from llmb.ops.quant.activation_quant import PerTokenFp8, quantize_activation
from op_cases import Arguments, cases, full_size_cases, randn

# Hopper's fp8 tensor cores align the products of a sum to its largest and keep 14 bits: 2e-4 here. Interpreter: fp32.
FP8_MMA = 1e-3 if torch.cuda.is_available() else 1e-5
SHAPES = [(1, 64, 1), (1, 128, 9), (3, 200, 4), (16, 1, 2), (17, 130, 3), (64, 256, 2), (70, 96, 5)]


@cases(block_scaled_mm, *SHAPES, tolerance=FP8_MMA)
@cases(block_scaled_mm, (1, 128, 9, bfloat16), (17, 130, 3, bfloat16), tolerance=2**-7)  # the interpreter truncates
@full_size_cases(block_scaled_mm, *((n, 576, 8, bfloat16) for n in (66, 129, 4096)), tolerance=0.004, exact=None)
def block_scaled(g: Generator, d: device, n: int, o: int, groups: int, out_dtype: dtype = float32) -> Arguments:
    block_scales = torch.randn(groups, generator=g).exp().repeat_interleave(128).to(d)
    x, weight = randn(g, d, n, 128 * groups) * block_scales, randn(g, d, o, 128 * groups) * block_scales
    return (quantize_activation(x, "1x128"), quantize_blocks(weight), o, out_dtype), {}


@cases(block_scaled_mm, (5, 128, 4), (4, 70, 2), tolerance=FP8_MMA)
def block_scaled_with_transposed_scales_and_nan_padding(
    g: Generator, d: device, n: int, o: int, groups: int
) -> Arguments:
    (x, weight, *others), _ = block_scaled(g, d, n, o, groups)
    weight.values.view(torch.uint8)[o:] = 0x7F  # not a number
    return (x._replace(scales=x.scales.T.contiguous().T), weight, *others), {}


@cases(skinny_gemm, (1, 128, 32), (4, 1100, 14, True), (2, 2304, 6, False, "silu"), tolerance=2e-5)
@cases(skinny_gemm, (4, 16, 2, False, "silu", True), (1, 2304, 14, True, "gelu"), tolerance=2e-5)
@cases(skinny_gemm, (3, 16, 32, True, "gelu", True), (1, 1100, 32, True, None, True), (2, 8, 2), tolerance=2e-5)
@cases(skinny_gemm, (2, 64, 32, True, "silu", False, bfloat16), tolerance=2**-7)
def skinny(
    g: Generator,
    d: device,
    n: int,
    k: int,
    o: int,
    has_norm: bool = False,
    activation: str | None = None,
    has_addend: bool = False,
    dtype: dtype = float32,
) -> Arguments:
    norm = InputNorm(randn(g, d, k, dtype=dtype), 1e-5) if has_norm else None
    addend = randn(g, d, n, o // 2 if activation else o, dtype=dtype) if has_addend else None
    x, weight = randn(g, d, n, k, scale=3, dtype=dtype), randn(g, d, o, k, scale=k**-0.5, dtype=dtype)
    return (x, SkinnyGemmWeight(weight), dtype, norm, activation, addend), {}


@cases(
    skinny_gemm, (1, 128, 32, True), (3, 1100, 10, True), (2, 2304, 14, False), (4, 16, 6, False),
    tolerance=2e-3 if torch.cuda.is_available() else 2e-5,  # on a GPU packed sums of eight are in fp16
)  # fmt: skip
def skinny_fp8(g: Generator, d: device, n: int, k: int, o: int, scaled_input: bool) -> Arguments:
    weight = SkinnyGemmWeight(randn(g, d, o, k, dtype=float8_e4m3fn), randn(g, d, o).abs())
    x = randn(g, d, n, k)
    return (PerTokenFp8(x, randn(g, d, n, 1).abs()) if scaled_input else x, weight, float32), {}


LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@full_size_cases(
    skinny_gemm,
    *((layer, fp8, tokens) for layer in LLAMA_8B for fp8 in (True, False) for tokens in (1, 3, 4)),
    tolerance=0.003,
    exact=None,
)
def llama_decode(g: Generator, d: device, layer: str, fp8: bool, tokens: int) -> Arguments:
    o, k = LLAMA_8B[layer]
    values = randn(g, d, o, k, scale=k**-0.5)
    rounded = quantize_activation(values, "per_token")
    assert isinstance(rounded, PerTokenFp8)
    weight = SkinnyGemmWeight(rounded.values, rounded.scales[:, 0]) if fp8 else SkinnyGemmWeight(values.to(bfloat16))
    norm = InputNorm(randn(g, d, k, dtype=bfloat16), 1e-5) if layer in ("qkv", "gate_up") else None
    addend = randn(g, d, tokens, o, dtype=bfloat16) if layer in ("o", "down") else None
    activation = "silu" if layer == "gate_up" else None
    return (randn(g, d, tokens, k, dtype=bfloat16), weight, float32, norm, activation, addend), {}


@cases(split_k_gemm, (3, 128, 100), (16, 2048, 64), (17, 4096, 70), (50, 384, 130), (128, 512, 64), tolerance=FP8_MMA)
def split_k(g: Generator, d: device, n: int, k: int, o: int, out_dtype: dtype = float32) -> Arguments:
    x, weight = (quantize_activation(randn(g, d, rows, k), "per_token") for rows in (n, o))
    assert isinstance(x, PerTokenFp8)
    assert isinstance(weight, PerTokenFp8)
    return (x, SplitKWeight.of(weight.values, weight.scales[:, 0].contiguous()), out_dtype), {}


@full_size_cases(
    split_k_gemm, *((layer, n) for layer in LLAMA_8B for n in (3, 16, 31, 64, 82, 128)), tolerance=0.003, exact=None
)
def llama_few_tokens(g: Generator, d: device, layer: str, tokens: int) -> Arguments:
    o, k = LLAMA_8B[layer]
    return split_k(g, d, tokens, k, o, bfloat16)
