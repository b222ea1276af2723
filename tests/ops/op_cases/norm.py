"""RMSNorm and its fusions."""

from torch import Generator, bfloat16, device, dtype, float32, full

from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.norm.gated_norm import gated_norm
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.activation_quant import QuantFormat
from op_cases import Arguments, cases, randn
from op_cases.quant import FP8_FORMATS, fp8_layouts, scale_amax

EPS = 1e-5


@cases(rms_norm, (5, 12), (1, 64), (11, 1000), (3, 1), (5, 12, 0.0), (5, 12, 1e3), tolerance=2e-5)
@cases(rms_norm, (6, 24, 1, bfloat16), tolerance=2**-7)  # one bf16 step: the interpreter truncates
def rms(g: Generator, d: device, n: int, c: int, scale: float = 1, dtype: dtype = float32) -> Arguments:
    return (randn(g, d, n, c, dtype=dtype, scale=scale), randn(g, d, c, dtype=dtype), EPS), {}


@cases(rms_norm_backward, (5, 12, False), (11, 1000, True), (3, 1, True), (70, 20, True, 1e3), tolerance=2e-5)
@cases(rms_norm_backward, (5, 12, True, 0.0), tolerance=2e-5)
@cases(rms_norm_backward, (6, 24, True, 1, bfloat16), (6, 24, False, 1, bfloat16), tolerance=2**-7)
def rms_backward(
    g: Generator, d: device, n: int, c: int, residual: bool, scale: float = 1, dtype: dtype = float32
) -> Arguments:
    dy, x, d_residual = (randn(g, d, n, c, dtype=dtype, scale=s) for s in (1, scale, 1))
    out, weight, dweight = full((n, c), 7.0, dtype=dtype, device=d), randn(g, d, c, dtype=dtype), randn(g, d, c)
    return (dy, x, weight, EPS, d_residual if residual else None, out, dweight, not residual), {}


@cases(rms_norm_fp8, *((n, c, "rc") for n, c in ((5, 12), (130, 70), (3, 1), (16, 1000))), tolerance=1e-5)
@cases(
    rms_norm_fp8, *((5, 12, which) for which in ("r", "c", "")), (130, 70, "rc", 0.0), (5, 12, "r", 1e4), tolerance=1e-5
)
def rms_fp8(g: Generator, d: device, n: int, c: int, which: str, scale: float = 1) -> Arguments:
    x, weight = randn(g, d, n, c, dtype=bfloat16, scale=scale), randn(g, d, c, dtype=bfloat16)
    return (x, weight, EPS, scale_amax(d, 0.011), *fp8_layouts(d, n, c, which)), {}


FORMATS: tuple[QuantFormat, ...] = ("plain", *FP8_FORMATS)


@cases(add_rms_norm, *((f, 3, 384, True) for f in FORMATS), ("per_token", 1, 100, True), tolerance=1e-5, scratch=(1,))
@cases(add_rms_norm, *((f, 5, 1024, False) for f in FORMATS), tolerance=1e-5)
def add_rms(g: Generator, d: device, quant_format: QuantFormat, n: int, c: int, residual: bool) -> Arguments:
    x, residual_NC = (randn(g, d, n, c) for _ in range(2))
    return (x, residual_NC if residual else None, randn(g, d, c), EPS, quant_format), {}


@cases(gated_norm, (2, 5, 2, 12), (1, 1, 1, 64), (1, 37, 2, 10, 1e3), (1, 3, 3, 2, 0.0), tolerance=2e-5)
def gated(g: Generator, d: device, b: int, t: int, groups: int, c: int, scale: float = 1) -> Arguments:
    shapes = ((b, t, groups * c), (b, t, groups, c), (groups * c,))
    y, gate, weight = (randn(g, d, *shape, scale=scale).requires_grad_() for shape in shapes)
    return (y, gate, weight, EPS), {}
