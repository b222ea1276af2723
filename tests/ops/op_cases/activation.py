"""Activations of MLPs."""

from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.activation.activation import ACTIVATIONS, activation_backward, activation_forward, gated_activation
from llmb.ops.activation.swiglu_fp8 import swiglu_backward_fp8, swiglu_fp8
from llmb.ops.quant.activation_quant import QuantFormat
from llmb.ops.quant.fp8_quant import E5M2, padded_tokens
from op_cases import Arguments, cases, randn
from op_cases.quant import FP8_FORMATS, fp8_full, fp8_layouts, scale_amax


@cases(activation_forward, *((kind, gated) for kind in ACTIVATIONS for gated in (False, True)), tolerance=2e-6)
def forward(g: Generator, d: device, activation: str, gated: bool) -> Arguments:
    return (randn(g, d, 7, 300, scale=3), activation, randn(g, d, 7, 300) if gated else None), {}


@cases(activation_backward, *((kind, gated) for kind in ACTIVATIONS for gated in (False, True)), tolerance=2e-6)
@cases(activation_backward, ("silu", True, bfloat16), ("gelu", False, bfloat16), tolerance=2**-7)
def backward(g: Generator, d: device, activation: str, gated: bool, dtype: dtype = float32) -> Arguments:
    dact, x, up = (randn(g, d, 5, 3, 211, scale=s, dtype=dtype) for s in (1, 3, 1))
    return (dact, x, activation, up if gated else None), {}


@cases(
    gated_activation, *((kind, f, 4, 384) for kind in ("silu", "gelu") for f in ("plain", *FP8_FORMATS)), tolerance=1e-5
)
@cases(gated_activation, ("silu", "per_token", 1, 100), ("gelu", "plain", 3, 7), tolerance=1e-5)
def gate_up(g: Generator, d: device, activation: str, quant_format: QuantFormat, n: int, f: int) -> Arguments:
    return (randn(g, d, n, 2 * f), activation, quant_format), {}


@cases(activation_forward, (3, 10), (1, 1), (2, 2049), (17, 64, 0.0), (3, 10, 1e3), tolerance=2e-6)
@cases(activation_forward, (4, 24, 1, bfloat16), tolerance=2**-7)
def gate_beside_up(g: Generator, d: device, n: int, f: int, scale: float = 1, dtype: dtype = float32) -> Arguments:
    gate, up = randn(g, d, n, 2 * f, scale=scale, dtype=dtype).chunk(2, dim=-1)
    return (gate, "silu", up), {}


@cases(activation_backward, (3, 10), (1, 1), (2, 2049), (17, 64, 0.0), (3, 10, 1e3), (5, 30, 1, False), tolerance=2e-6)
@cases(activation_backward, (4, 24, 1, True, bfloat16), tolerance=2**-7)
def in_place(
    g: Generator, d: device, n: int, f: int, scale: float = 1, recompute: bool = True, dtype: dtype = float32
) -> Arguments:
    dact, (gate, up) = randn(g, d, n, f, dtype=dtype), randn(g, d, n, 2 * f, scale=scale, dtype=dtype).chunk(2, dim=-1)
    return (dact, gate, "silu", up, (gate, up), recompute), {}


@cases(swiglu_fp8, *((n, f, "rc") for n, f in ((3, 10), (1, 1), (300, 70), (64, 65))), tolerance=1e-5)
@cases(
    swiglu_fp8,
    *((17, 64, which) for which in ("r", "c", "")),
    (17, 64, "rc", 0.0),
    (17, 64, "rc", 30.0),
    tolerance=1e-5,
)
def fp8(g: Generator, d: device, n: int, f: int, which: str, scale: float = 1) -> Arguments:
    h = randn(g, d, n, 2 * f, scale=scale, dtype=bfloat16)
    return (h, scale_amax(d, 0.013 * max(scale, 1)), *fp8_layouts(d, n, f, which)), {}


@cases(swiglu_backward_fp8, (3, 10), (1, 1), (300, 70), (64, 65), (17, 64, 0.0), (17, 64, 30.0), tolerance=1e-5)
@cases(swiglu_backward_fp8, (17, 64, 1, False), tolerance=1e-5)
def fp8_backward(g: Generator, d: device, n: int, f: int, scale: float = 1, writes: bool = True) -> Arguments:
    dact, h = randn(g, d, n, f, dtype=bfloat16), randn(g, d, n, 2 * f, scale=scale, dtype=bfloat16)
    dh_scale_amax, act_scale_amax = (scale_amax(d, s * max(scale, 1)) for s in (3e-4, 0.013))
    outputs = *fp8_layouts(d, n, 2 * f, "rc", E5M2), fp8_full(d, f, padded_tokens(n))
    dh_rows, dh_columns, act_columns = outputs if writes else (None, None, None)
    return (dact, h, dh_scale_amax, dh_rows, dh_columns, act_scale_amax, act_columns), {}
