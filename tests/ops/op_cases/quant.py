"""Quantization to fp8."""

from math import inf, nan

import torch
from torch import Generator, Tensor, bfloat16, device, dtype, float32

from llmb.ops.quant.activation_quant import E4M3, QuantFormat, quantize_activation
from llmb.ops.quant.blockwise_quant import empty_blockwise, quantize_blockwise_
from llmb.ops.quant.channel_quant import ChannelFp8, quantize_channels_, widen_channels_
from llmb.ops.quant.fp8_quant import E5M2, ScaleAmax, padded_tokens, quantize_fp8
from llmb.ops.quant.group_quant import GroupedFp8, group_offsets, padded_columns, quantize_groups_, weight_group_offsets
from llmb.ops.quant.scaled_fp8 import ScaledFp8
from op_cases import Arguments, cases, full_size_cases, in_wider_rows, randn

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
@cases(quantize_activation, ("per_token", 0, 128), tolerance=0)
@full_size_cases(
    quantize_activation, *((f, n, k, 1, bfloat16) for f in FP8_FORMATS for n, k in ((1, 7168), (37, 4096))),
    tolerance=0.02, exact=None,
)  # fmt: skip
def activation(
    g: Generator, d: device, quant_format: QuantFormat, n: int, k: int, scale: float = 1, dtype: dtype = float32
) -> Arguments:
    return (randn(g, d, n, k + 64, scale=scale, dtype=dtype)[:, :k], quant_format), {}  # rows with a stride


@cases(
    quantize_fp8,
    *((n, k, "rc", E4M3) for n, k in ((128, 64), (130, 70), (16, 200), (5, 3), (1, 1), (257, 16))),
    *((130, 70, "rc", E5M2, 1e4), (16, 200, "rc", E4M3, 1e30), (5, 3, "rc", E5M2, 0.0)),
    (40, 24, "rc", E4M3, 1, float32),
    *((40, 24, "r", E4M3), (40, 24, "c", E5M2), (40, 24, "", E4M3), (0, 16, "rc", E4M3)),
    tolerance=0,
)  # fmt: skip
@full_size_cases(
    quantize_fp8,
    *((n, k, "rc", fp8, 60) for n, k in ((16384, 4096), (4099, 6144), (1, 4096), (300, 100)) for fp8 in (E4M3, E5M2)),
    *((28672, 1000, which, fp8, 60) for which in ("rc", "r", "c") for fp8 in (E4M3, E5M2)),
    *((1000, 4096, "rc", E4M3, 60, float32), (4096, 1040, "rc", E5M2, 60, float32)),
    tolerance=0,
    exact=None,
)
def matrix(
    g: Generator, d: device, n: int, k: int, which: str, fp8: dtype, scale: float = 1, dtype: dtype = bfloat16
) -> Arguments:
    x = randn(g, d, n, k, scale=scale, dtype=dtype)
    return (x, scale_amax(d, 0.37), *fp8_layouts(d, n, k, which, fp8)), {}


@cases(quantize_fp8, (E4M3,), (E5M2,), tolerance=0)
def special_values(g: Generator, d: device, fp8: dtype) -> Arguments:
    """Beyond the range, infinite and NaN, each with its own effect on amax."""
    x = torch.tensor([[1e5, -1e5, 3e38, -inf, 1.0], [nan, inf, -inf, 0.0, -1.0]], device=d)
    return (x, scale_amax(d, 1.0, 3.0), *fp8_layouts(d, 2, 5, "rc", fp8)), {}


@cases(quantize_fp8, (3.0,), (-2.0,), (inf,), tolerance=0)
def amax_of_earlier_tensors(g: Generator, d: device, value: float) -> Arguments:
    return (torch.full((3, 3), value, device=d), scale_amax(d, 1.0, 2.5), None, None), {}


@cases(quantize_fp8, (6, 24), tolerance=0)
def matrix_inside_wider_rows(g: Generator, d: device, n: int, k: int) -> Arguments:
    rows, columns = fp8_layouts(d, n, k, "rc")
    return (in_wider_rows(randn(g, d, n, k, dtype=bfloat16)), scale_amax(d, 0.02), in_wider_rows(rows), columns), {}


@cases(quantize_fp8, (128, 48, E4M3), (100, 48, E5M2), tolerance=0)
def columns_of_gathered_rows(g: Generator, d: device, n: int, k: int, fp8: dtype) -> Arguments:
    """Tensor-parallel ranks gather rows in fp8 and transpose them."""
    return (randn(g, d, n, k, dtype=fp8), scale_amax(d, 1.0, None), None, fp8_layouts(d, n, k, "c", fp8)[1]), {}


@cases(quantize_fp8, (80, 48, "rc"), (17, 30, "r"), (64, 144, "c"), tolerance=0)
def without_amax(g: Generator, d: device, n: int, k: int, which: str) -> Arguments:
    return (randn(g, d, n, k), scale_amax(d, 0.01, None), *fp8_layouts(d, n, k, which)), {}


@cases(widen_channels_, (5, 12), (3, 4100), (1, 1), (0, 8), (7, 24, bfloat16), tolerance=0)
@full_size_cases(widen_channels_, (1000, 8192, bfloat16), (77, 28672, bfloat16), tolerance=0, exact=None)
def frozen_weight(g: Generator, d: device, m: int, k: int, dtype: dtype = float32) -> Arguments:
    weight = ChannelFp8(fp8_full(d, m, k), torch.empty(m, device=d))
    quantize_channels_(randn(g, d, m, k, scale=0.02), weight)
    return (weight.values, weight.scales, torch.full((m, k), 7.0, dtype=dtype, device=d)), {}


MANY_GROUPS = [n % 37 for n in range(64)]
FULL_SIZE_GROUPS = ([512, 512], [1, 0, 700, 323], [0, 130, 0, 0, 71, 0], MANY_GROUPS, [3, 0, 0, 0, 0, 0, 0, 2])


@cases(quantize_groups_, ([1, 0, 40, 23], 48, "rc"), ([130, 0, 1, 128, 17], 80, "rc"), tolerance=0)
@cases(quantize_groups_, ([16, 32, 16], 48, "r"), ([0, 0, 5], 33, "c"), ([64], 48, "rc"), tolerance=0)
@cases(quantize_groups_, *(([130, 0, 1, 128, 17], 48, which, bfloat16) for which in ("rc", "r", "c")), tolerance=0)
@full_size_cases(
    quantize_groups_,
    *((sizes, k, "rc", t) for sizes in FULL_SIZE_GROUPS for k, t in ((512, float32), (2048, bfloat16))),
    tolerance=0,
    exact=None,
)
def groups(g: Generator, d: device, sizes: list[int], k: int, which: str, dtype: dtype = float32) -> Arguments:
    n, ends_E = sum(sizes), torch.tensor(sizes, dtype=torch.int32, device=d).cumsum(0, dtype=torch.int32)
    x = randn(g, d, n, k, dtype=dtype) * 10 ** randn(g, d, n, 1, dtype=dtype)  # rows differ, as those of gradients do
    return (x, group_offsets(ends_E, n), _grouped(d, n, k, len(sizes), which)), {}


@cases(quantize_groups_, (nan,), (inf,), (-inf,), tolerance=0)
def groups_with_a_nonfinite_value(g: Generator, d: device, value: float) -> Arguments:
    arguments, _ = groups(g, d, [16, 16], 32, "rc")  # without padding, which the kernel divides by the scale too
    arguments[0][3, 5] = value
    return arguments, {}


@cases(quantize_groups_, (3, 64, 48), (2, 16, 144), (3, 160, 48, bfloat16), tolerance=0)
@full_size_cases(quantize_groups_, (3, 336, 1040), (3, 336, 1040, bfloat16), tolerance=0, exact=None)
def expert_weights(g: Generator, d: device, e: int, o: int, i: int, dtype: dtype = float32) -> Arguments:
    weight_EOI, out = randn(g, d, e, o, i, dtype=dtype), _grouped(d, e * o, i, e, "rc")
    out = out._replace(columns=fp8_full(d, e, i, o))
    return (weight_EOI.flatten(0, 1), weight_group_offsets(weight_EOI), out), {}


@cases(quantize_groups_, (48, 80, "rc"), (130, 48, "c"), tolerance=0)
def matrix_with_larger_amaxes(g: Generator, d: device, n: int, k: int, which: str) -> Arguments:
    """As ranks that share rows and columns reduce them; magnitudes are integers of the same bits."""
    arguments, _ = groups(g, d, [n], k, which, bfloat16)
    two = torch.tensor(2.0).view(torch.int32).item()
    return (*arguments, (lambda bits_N: bits_N.clamp_(min=two), lambda bits_K: bits_K.add_(1 << 23))), {}


@cases(
    quantize_blockwise_,
    *((n, k, which) for n, k in ((128, 128), (130, 256), (5, 128)) for which in ("rc", "r", "c")),
    *((300, 384, "rc", False, float32), (7, 128, "rc", False, bfloat16, 0.0)),
    *((128, 128, which, True) for which in ("rc", "r", "c")),
    *((384, 640, "rc", True), (256, 128, "rc", True, float32)),
    tolerance=0,
)
@full_size_cases(
    quantize_blockwise_,
    *((n, k, which, False) for n, k in ((16384, 4096), (4099, 28672)) for which in ("rc", "r", "c")),
    *((6144, 4096, "rc", True), (4096, 14336, "rc", True)),
    tolerance=0,
    exact=None,
)
def groups_of_128(
    g: Generator, d: device, n: int, k: int, which: str, square: bool = False, dtype: dtype = bfloat16,
    scale: float = 1,
) -> Arguments:  # fmt: skip
    """Rows and columns of different magnitudes, inside wider rows."""
    x = randn(g, d, n, k, scale=scale) * 10 ** randn(g, d, n, 1) * 10 ** randn(g, d, 1, k)
    return (in_wider_rows(x.to(dtype)), _blockwise(d, n, k, which, square), square), {}


@cases(quantize_blockwise_, (nan, False), (inf, False), (-inf, True), (nan, True), tolerance=0)
def groups_of_128_with_a_nonfinite_value(g: Generator, d: device, value: float, square: bool) -> Arguments:
    x = randn(g, d, 256, 256)
    x[3, 5] = value
    return (x, _blockwise(d, 256, 256, "rc", square), square), {}


def _blockwise(d: device, n: int, k: int, which: str, square: bool) -> ScaledFp8:
    out = empty_blockwise(n, k, d, rows="r" in which, columns="c" in which, square=square)
    for x in out:
        x.copy_(torch.zeros(x.shape, device=d))
    return out


def _grouped(d: device, n: int, k: int, e: int, which: str) -> GroupedFp8:
    rows = (fp8_full(d, n, k), torch.zeros(n, device=d)) if "r" in which else (None, None)
    columns = (fp8_full(d, k, padded_columns(n, e)), torch.zeros(e, k, device=d)) if "c" in which else (None, None)
    return GroupedFp8(*rows, *columns)
