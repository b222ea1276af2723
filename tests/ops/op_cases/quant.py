"""Quantization to fp8."""

import torch
from torch import Generator, Tensor, bfloat16, device, dtype, float32

from llmb.ops.quant.activation_quant import E4M3, QuantFormat, quantize_activation
from llmb.ops.quant.fp8_quant import E5M2, ScaleAmax, padded_tokens, quantize_fp8
from llmb.ops.quant.group_quant import GroupedFp8, group_offsets, padded_columns, quantize_groups_, weight_group_offsets
from op_cases import Arguments, cases, randn

FP8_FORMATS: tuple[QuantFormat, ...] = ("per_token", "1x128")


def scale_amax(d: device, scale: float, amax: float | None = 0.0) -> ScaleAmax:
    return ScaleAmax(torch.tensor(scale, device=d), None if amax is None else torch.tensor(amax, device=d))


def fp8_full(d: device, *shape: int, dtype: dtype = E4M3) -> Tensor:
    """A buffer full of values that a kernel must overwrite, or leave alone."""
    return torch.full(shape, 7.0, device=d).to(dtype)


def fp8_layouts(d: device, n: int, k: int, which: str, dtype: dtype = E4M3) -> tuple[Tensor | None, Tensor | None]:
    """Rows and columns, each if its first letter is in `which`."""
    rows, columns = fp8_full(d, n, k, dtype=dtype), fp8_full(d, k, padded_tokens(n), dtype=dtype)
    return rows if "r" in which else None, columns if "c" in which else None


@cases(
    quantize_activation, *((f, n, k) for f in FP8_FORMATS for n, k in ((1, 128), (5, 384), (3, 1024))), tolerance=1e-6
)
@cases(quantize_activation, ("per_token", 4, 100, 0.0), ("1x128", 2, 256, 0.0, bfloat16), tolerance=1e-6)
def activation(
    g: Generator, d: device, quant_format: QuantFormat, n: int, k: int, scale: float = 1, dtype: dtype = float32
) -> Arguments:
    return (randn(g, d, n, k + 64, scale=scale, dtype=dtype)[:, :k], quant_format), {}  # rows with a stride


@cases(
    quantize_fp8,
    *((n, k, "rc", E4M3) for n, k in ((128, 64), (130, 70), (16, 200), (5, 3), (1, 1), (257, 16))),
    *((130, 70, "rc", E5M2, 1e4), (16, 200, "rc", E4M3, 1e30), (5, 3, "rc", E5M2, 0.0)),
    (40, 24, "rc", E4M3, 1, float32),
    *((40, 24, "r", E4M3), (40, 24, "c", E5M2), (40, 24, "", E4M3)),
    tolerance=0,
)  # fmt: skip
def matrix(
    g: Generator, d: device, n: int, k: int, which: str, fp8: dtype, scale: float = 1, dtype: dtype = bfloat16
) -> Arguments:
    x = randn(g, d, n, k, scale=scale, dtype=dtype)
    return (x, scale_amax(d, 0.37), *fp8_layouts(d, n, k, which, fp8)), {}


@cases(quantize_fp8, (80, 48, "rc"), (17, 30, "r"), (64, 144, "c"), tolerance=0)
def without_amax(g: Generator, d: device, n: int, k: int, which: str) -> Arguments:
    return (randn(g, d, n, k), scale_amax(d, 0.01, None), *fp8_layouts(d, n, k, which)), {}


@cases(quantize_groups_, ([1, 0, 40, 23], 48, "rc"), ([300, 0, 1, 129, 128, 127], 80, "rc"), tolerance=0)
@cases(quantize_groups_, ([16, 32, 16], 48, "r"), ([0, 0, 5], 33, "c"), tolerance=0)
def groups(g: Generator, d: device, sizes: list[int], k: int, which: str) -> Arguments:
    n, ends_E = sum(sizes), torch.tensor(sizes, dtype=torch.int32, device=d).cumsum(0, dtype=torch.int32)
    return (randn(g, d, n, k), group_offsets(ends_E, n), _grouped(d, n, k, len(sizes), which)), {}


@cases(quantize_groups_, (3, 64, 48), (2, 16, 144), tolerance=0)
def expert_weights(g: Generator, d: device, e: int, o: int, i: int) -> Arguments:
    weight_EOI, out = randn(g, d, e, o, i), _grouped(d, e * o, i, e, "rc")
    out = out._replace(columns=fp8_full(d, e, i, o))
    return (weight_EOI.flatten(0, 1), weight_group_offsets(weight_EOI), out), {}


def _grouped(d: device, n: int, k: int, e: int, which: str) -> GroupedFp8:
    rows = (fp8_full(d, n, k), torch.zeros(n, device=d)) if "r" in which else (None, None)
    columns = (fp8_full(d, k, padded_columns(n, e)), torch.zeros(e, k, device=d)) if "c" in which else (None, None)
    return GroupedFp8(*rows, *columns)
