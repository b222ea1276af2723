"""Activations of MLPs."""

from math import inf, nan

from torch import Generator, bfloat16, device, dtype, float32, ones, tensor

from llmb.ops.activation.activation import ACTIVATIONS, activation_backward, activation_forward, gated_activation
from llmb.ops.activation.glu_fp8 import glu_backward_fp8, glu_fp8
from llmb.ops.quant.activation_quant import QuantFormat
from llmb.ops.quant.fp8_quant import E5M2, padded_tokens
from op_cases import Arguments, cases, full_size_cases, in_wider_rows, randn
from op_cases.quant import FP8_FORMATS, fp8_full, fp8_layouts, scale_amax

LLAMA_ROWS = ((1025, 14336), (1, 14336), (100, 11008), (33, 1001))


@cases(activation_forward, *((kind, gated) for kind in ACTIVATIONS for gated in (False, True)), tolerance=2e-6)
def forward(g: Generator, d: device, activation: str, gated: bool) -> Arguments:
    return (randn(g, d, 7, 300, scale=3), activation, randn(g, d, 7, 300) if gated else None), {}


@cases(activation_backward, *((kind, gated) for kind in ACTIVATIONS for gated in (False, True)), tolerance=2e-6)
@cases(activation_backward, ("silu", True, bfloat16), ("gelu", False, bfloat16), tolerance=2**-7)
def backward(g: Generator, d: device, activation: str, gated: bool, dtype: dtype = float32) -> Arguments:
    dact, x, up = (randn(g, d, 5, 3, 211, scale=s, dtype=dtype) for s in (1, 3, 1))
    return (dact, x, activation, up if gated else None), {}


@cases(activation_forward, (4,), tolerance=2e-6)
def clamped_forward(g: Generator, d: device, n: int) -> Arguments:
    """Some gates and some values of up exceed the limit of swigluoai on either side, one is NaN."""
    gate, up = randn(g, d, n, 300, scale=5), randn(g, d, n, 300, scale=5)
    gate[0, 0] = nan
    return (gate, "swigluoai", up), {}


@cases(activation_backward, (float32,), tolerance=2e-6)
@cases(activation_backward, (bfloat16,), tolerance=2**-7)
def clamped_backward(g: Generator, d: device, dtype: dtype) -> Arguments:
    dact, gate, up = (randn(g, d, 5, 211, scale=s, dtype=dtype) for s in (1, 5, 5))
    return (dact, gate, "swigluoai", up, None, True), {}


@cases(gated_activation, ("swigluoai", "plain", 4, 384), tolerance=1e-5)
@cases(
    gated_activation, *((kind, f, 4, 384) for kind in ("silu", "gelu") for f in ("plain", *FP8_FORMATS)), tolerance=1e-5
)
@cases(
    gated_activation, ("silu", "per_token", 1, 100), ("gelu", "plain", 3, 7), ("silu", "plain", 0, 128), tolerance=1e-5
)
@full_size_cases(
    gated_activation, ("silu", "plain", 1, 7168, bfloat16), ("silu", "plain", 37, 4096, bfloat16),
    tolerance=0.01, exact=None,
)  # fmt: skip
@full_size_cases(  # the reference rounds to bf16 first: a few fp8 values, and their scale, differ by a step
    gated_activation, *(("silu", f, *rows, bfloat16) for f in FP8_FORMATS for rows in ((1, 7168), (37, 4096))),
    tolerance=0.04, exact=None,
)  # fmt: skip
def gate_up(
    g: Generator, d: device, activation: str, quant_format: QuantFormat, n: int, f: int, dtype: dtype = float32
) -> Arguments:
    return (randn(g, d, n, 2 * f, dtype=dtype), activation, quant_format), {}


@cases(activation_forward, (3, 10), (1, 1), (2, 2049), (17, 64, 0.0), (3, 10, 1e3), tolerance=2e-6)
@cases(activation_forward, (4, 24, 1, bfloat16), tolerance=2**-7)
@full_size_cases(
    activation_forward, *((*rows, 1, t) for rows in LLAMA_ROWS for t in (float32, bfloat16)), tolerance=1e-6
)
def gate_beside_up(g: Generator, d: device, n: int, f: int, scale: float = 1, dtype: dtype = float32) -> Arguments:
    gate, up = randn(g, d, n, 2 * f, scale=scale, dtype=dtype).chunk(2, dim=-1)
    return (gate, "silu", up), {}


@cases(activation_backward, (3, 10), (1, 1), (2, 2049), (17, 64, 0.0), (3, 10, 1e3), (5, 30, 1, False), tolerance=2e-6)
@cases(activation_backward, (4, 24, 1, True, bfloat16), tolerance=2**-7)
@full_size_cases(
    activation_backward, *((*rows, 1, True, t) for rows in LLAMA_ROWS for t in (float32, bfloat16)), tolerance=1e-6
)
def in_place(
    g: Generator, d: device, n: int, f: int, scale: float = 1, recompute: bool = True, dtype: dtype = float32
) -> Arguments:
    dact, (gate, up) = randn(g, d, n, f, dtype=dtype), randn(g, d, n, 2 * f, scale=scale, dtype=dtype).chunk(2, dim=-1)
    return (dact, gate, "silu", up, (gate, up), recompute), {}


@cases(activation_forward, (4, 24), tolerance=2**-7)
def forward_inside_wider_rows(g: Generator, d: device, n: int, f: int) -> Arguments:
    gate, up = in_wider_rows(randn(g, d, n, 2 * f, dtype=bfloat16)).chunk(2, dim=-1)
    return (gate, "silu", up, in_wider_rows(randn(g, d, n, f, dtype=bfloat16))), {}


@cases(activation_backward, (4, 24), tolerance=2**-7)
def backward_inside_wider_rows(g: Generator, d: device, n: int, f: int) -> Arguments:
    dact, h = (in_wider_rows(randn(g, d, n, width, dtype=bfloat16)) for width in (f, 2 * f))
    gate, up = h.chunk(2, dim=-1)
    return (dact, gate, "silu", up, (gate, up), True), {}


@cases(activation_forward, *((kind,) for kind in ACTIVATIONS), tolerance=0)
def large_values_and_nan(g: Generator, d: device, activation: str) -> Arguments:
    return (tensor([-1e10, -1e4, 1e4, 1e10, nan], device=d), activation, None), {}


@cases(activation_backward, *((kind,) for kind in ACTIVATIONS), tolerance=2e-6)
def gradients_of_large_values_and_nan(g: Generator, d: device, activation: str) -> Arguments:
    return (ones(5, device=d), tensor([-1e10, -1e4, 1e4, 1e10, nan], device=d), activation, None), {}


@cases(activation_backward, *((gate,) for gate in (-3e38, -1e4, 1e4, 3e38)), tolerance=2e-6)
def saturated_gate(g: Generator, d: device, gate: float) -> Arguments:
    gate_up = tensor([[gate]], device=d), tensor([[1.0]], device=d)
    return (ones(1, 1, device=d), gate_up[0], "silu", gate_up[1], gate_up, True), {}


@cases(glu_fp8, *((n, f, "rc") for n, f in ((3, 10), (1, 1), (140, 70), (64, 65), (0, 16))), tolerance=1e-5)
@cases(
    glu_fp8,
    *((17, 64, which) for which in ("r", "c", "")),
    (17, 64, "rc", 0.0),
    (17, 64, "rc", 30.0),
    (17, 64, "rc", 1, "gelu"),
    tolerance=1e-5,
)
@full_size_cases(
    glu_fp8,
    *((n, f, which) for n, f in ((8192, 14336), (33, 1008), (1, 14336)) for which in ("rc", "r")),
    (8192, 14336, "rc", 1, "gelu"),
    tolerance=1e-5,
    exact=None,
)
def fp8(g: Generator, d: device, n: int, f: int, which: str, scale: float = 1, activation: str = "silu") -> Arguments:
    h = randn(g, d, n, 2 * f, scale=scale, dtype=bfloat16)
    return (h, activation, scale_amax(d, 0.013 * max(scale, 1)), *fp8_layouts(d, n, f, which)), {}


@cases(glu_backward_fp8, (300, 10), (64, 65), (17, 64, 0.0), (17, 64, 30.0), (17, 64, 1, True, "gelu"), tolerance=1e-5)
@cases(glu_backward_fp8, (17, 64, 1, False), (0, 16), tolerance=1e-5)
@full_size_cases(glu_backward_fp8, (8192, 14336), (33, 1008), (1, 14336), tolerance=1e-5, exact=None)
@full_size_cases(glu_backward_fp8, (8192, 14336, 1, True, "gelu"), tolerance=1e-5, exact=None)
def fp8_backward(
    g: Generator, d: device, n: int, f: int, scale: float = 1, writes: bool = True, activation: str = "silu"
) -> Arguments:
    dact, h = randn(g, d, n, f, dtype=bfloat16), randn(g, d, n, 2 * f, scale=scale, dtype=bfloat16)
    dh_scale_amax, act_scale_amax = (scale_amax(d, s * max(scale, 1)) for s in (3e-4, 0.013))
    outputs = *fp8_layouts(d, n, 2 * f, "rc", E5M2), fp8_full(d, f, padded_tokens(n))
    dh_rows, dh_columns, act_columns = outputs if writes else (None, None, None)
    return (dact, h, activation, dh_scale_amax, dh_rows, dh_columns, act_scale_amax, act_columns), {}


@cases(glu_fp8, (6, 24), tolerance=1e-5)
def fp8_inside_wider_rows(g: Generator, d: device, n: int, f: int) -> Arguments:
    h = in_wider_rows(randn(g, d, n, 2 * f, dtype=bfloat16))
    return (h, "silu", scale_amax(d, 0.013), *fp8_layouts(d, n, f, "r")), {}


@cases(glu_backward_fp8, (6, 24), (6, 24, nan), (6, 24, inf), tolerance=1e-5)
def fp8_backward_inside_wider_rows(g: Generator, d: device, n: int, f: int, value: float = 1.0) -> Arguments:
    dact, h = (in_wider_rows(randn(g, d, n, width, dtype=bfloat16)) for width in (f, 2 * f))
    dact[2, 3] = value
    outputs = *fp8_layouts(d, n, 2 * f, "rc", E5M2), scale_amax(d, 0.013), fp8_full(d, f, padded_tokens(n))
    return (dact, h, "silu", scale_amax(d, 3e-4), *outputs), {}
