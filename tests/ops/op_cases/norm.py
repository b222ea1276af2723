"""RMSNorm and its fusions."""

from torch import Generator, bfloat16, device, dtype, float32, full, nan

from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.norm.gated_norm import gated_norm
from llmb.ops.norm.qkv_norm import qkv_norm_
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.activation_quant import QuantFormat
from op_cases import Arguments, cases, full_size_cases, in_wider_rows, randn
from op_cases.quant import FP8_FORMATS, fp8_layouts, scale_amax

EPS = 1e-5


LLAMA_ROWS = ((4099, 4096), (1, 4096), (515, 8192), (300, 5120), (1000, 2048), (77, 100))


@cases(rms_norm, (5, 12), (1, 64), (11, 1000), (3, 1), (0, 8), (5, 12, 0.0), (5, 12, 1e3), tolerance=2e-5)
@full_size_cases(rms_norm, *((*rows, 1, t) for rows in LLAMA_ROWS for t in (float32, bfloat16)), tolerance=1e-6)
@cases(rms_norm, (6, 24, 1, bfloat16), tolerance=2**-7)  # one bf16 step: the interpreter truncates
def rms(g: Generator, d: device, n: int, c: int, scale: float = 1, dtype: dtype = float32) -> Arguments:
    return (randn(g, d, n, c, dtype=dtype, scale=scale), randn(g, d, c, dtype=dtype), EPS), {}


@cases(rms_norm, (5, 12), (11, 1000), tolerance=2e-5)
@cases(rms_norm, (6, 24, bfloat16), tolerance=2**-7)
@full_size_cases(rms_norm, (4099, 3584, bfloat16), (77, 100), tolerance=1e-6)
def rms_and_add(g: Generator, d: device, n: int, c: int, dtype: dtype = float32) -> Arguments:
    x, addend = (in_wider_rows(randn(g, d, n, c, dtype=dtype)) for _ in range(2))
    return (x, randn(g, d, c, dtype=dtype), EPS, None, addend), {}


@cases(rms_norm, (6, 24), tolerance=2**-7)
def rms_inside_wider_rows(g: Generator, d: device, n: int, c: int) -> Arguments:
    x, out = (in_wider_rows(randn(g, d, n, c, dtype=bfloat16)) for _ in range(2))
    return (x, randn(g, d, c, dtype=bfloat16), EPS, out), {}


@cases(
    rms_norm_backward, (5, 12, False), (0, 8, True), (11, 1000, True), (3, 1, True), (70, 20, True, 1e3), tolerance=2e-5
)
@cases(rms_norm_backward, (5, 12, True, 0.0), tolerance=2e-5)
@cases(rms_norm_backward, (6, 24, True, 1, bfloat16), (6, 24, False, 1, bfloat16), tolerance=2**-7)
@full_size_cases(
    rms_norm_backward, *((*rows, r, 1, t) for rows in LLAMA_ROWS for r, t in ((True, float32), (False, bfloat16))),
    tolerance=1e-5,
)  # fmt: skip
def rms_backward(
    g: Generator, d: device, n: int, c: int, residual: bool, scale: float = 1, dtype: dtype = float32
) -> Arguments:
    dy, x, d_residual = (randn(g, d, n, c, dtype=dtype, scale=s) for s in (1, scale, 1))
    out, weight, dweight = full((n, c), 7.0, dtype=dtype, device=d), randn(g, d, c, dtype=dtype), randn(g, d, c)
    return (dy, x, weight, EPS, d_residual if residual else None, out, dweight, not residual), {}


@cases(rms_norm_backward, (5, 12), (70, 20), tolerance=2e-5)
@full_size_cases(rms_norm_backward, (515, 8192), tolerance=1e-5)
def rms_backward_of_a_frozen_weight(g: Generator, d: device, n: int, c: int) -> Arguments:
    dy, x, d_residual, out = (randn(g, d, n, c) for _ in range(4))
    return (dy, x, randn(g, d, c), EPS, d_residual, out, None, True), {}


@cases(rms_norm_backward, ("dy", float32), ("d_residual", float32), tolerance=2e-5)
@cases(rms_norm_backward, ("dy", bfloat16), ("wider rows", bfloat16), tolerance=2**-7)
def rms_backward_into(g: Generator, d: device, where: str, dtype: dtype) -> Arguments:
    """The output is an input, or everything is inside wider rows; gradients of the weight are of either dtype."""
    tensors = [randn(g, d, 9, 600, dtype=dtype) for _ in range(4)]
    dy, x, d_residual, out = (in_wider_rows(t) for t in tensors) if where == "wider rows" else tensors
    out = {"dy": dy, "d_residual": d_residual}.get(where, out)
    return (dy, x, randn(g, d, 600, dtype=dtype), EPS, d_residual, out, randn(g, d, 600, dtype=dtype), True), {}


@cases(rms_norm_fp8, (0, 16, "rc"), *((n, c, "rc") for n, c in ((5, 12), (130, 70), (3, 1), (16, 200))), tolerance=1e-5)
@cases(
    rms_norm_fp8, *((5, 12, which) for which in ("r", "c", "")), (5, 12, "rc", 0.0), (5, 12, "r", 1e4), tolerance=1e-5
)
@full_size_cases(
    rms_norm_fp8,
    *((*rows, which) for rows in ((16384, 4096), *LLAMA_ROWS[2:4], (77, 112)) for which in ("rc", "r", "c")),
    tolerance=1e-5,
    exact=None,
)
def rms_fp8(g: Generator, d: device, n: int, c: int, which: str, scale: float = 1) -> Arguments:
    x, weight = randn(g, d, n, c, dtype=bfloat16, scale=scale), randn(g, d, c, dtype=bfloat16)
    return (x, weight, EPS, scale_amax(d, 0.011), *fp8_layouts(d, n, c, which)), {}


@cases(rms_norm_fp8, ("r", False), ("rc", False), ("r", True), ("rc", True), tolerance=1e-5)
def rms_fp8_inside_wider_rows(g: Generator, d: device, which: str, has_nan: bool) -> Arguments:
    x, weight = in_wider_rows(randn(g, d, 6, 24, dtype=bfloat16)), randn(g, d, 24, dtype=bfloat16)
    if has_nan:
        x[2, 3] = nan  # spoils its token and amax
    return (x, weight, EPS, scale_amax(d, 0.011), *fp8_layouts(d, 6, 24, which)), {}


FORMATS: tuple[QuantFormat, ...] = ("plain", *FP8_FORMATS)


@cases(add_rms_norm, *((f, 3, 384, True) for f in FORMATS), ("per_token", 1, 100, True), tolerance=1e-5, scratch=(1,))
@cases(add_rms_norm, *((f, 5, 1024, False) for f in FORMATS), tolerance=1e-5)
@full_size_cases(
    add_rms_norm, ("plain", 1, 7168, True, bfloat16), ("plain", 37, 4096, True, bfloat16),
    tolerance=0.01, exact=None, scratch=(1,),
)  # fmt: skip
@full_size_cases(  # the reference rounds to bf16 first: a few fp8 values, and their scale, differ by a step
    add_rms_norm, *((f, n, c, True, bfloat16) for f in FP8_FORMATS for n, c in ((1, 7168), (37, 4096))),
    tolerance=0.04, exact=None, scratch=(1,),
)  # fmt: skip
def add_rms(
    g: Generator, d: device, quant_format: QuantFormat, n: int, c: int, residual: bool, dtype: dtype = float32
) -> Arguments:
    x, residual_NC = (randn(g, d, n, c, dtype=dtype) for _ in range(2))
    return (x, residual_NC if residual else None, randn(g, d, c, dtype=dtype), EPS, quant_format), {}


@cases(gated_norm, (2, 5, 2, 12), (1, 1, 1, 64), (1, 37, 1, 10, 1e3), (1, 3, 1, 2, 0.0), tolerance=2e-5)
def gated(g: Generator, d: device, b: int, t: int, groups: int, c: int, scale: float = 1) -> Arguments:
    shapes = ((b, t, groups * c), (b, t, groups, c), (groups * c,))
    y, gate, weight = (randn(g, d, *shape, scale=scale).requires_grad_() for shape in shapes)
    return (y, gate, weight, EPS), {}


@cases(gated_norm, (2, 5, 2, 20), tolerance=2**-7)
@full_size_cases(gated_norm, (2, 1000, 8, 1024), tolerance=4e-3)
def gate_inside_wider_rows(g: Generator, d: device, b: int, t: int, groups: int, c: int) -> Arguments:
    y, gate = (randn(g, d, b, t, *shape, dtype=bfloat16) for shape in ((groups * c,), (groups, c)))
    return (y.requires_grad_(), in_wider_rows(gate).requires_grad_(), randn(g, d, groups * c).requires_grad_(), EPS), {}


QKV_CASES = (  # tokens, heads, KV heads, head dimension, bias, width of a norm in heads
    *((5, 4, 2, 16, True, 1), (3, 3, 1, 24, False, 1), (0, 2, 1, 8, True, 1), (2, 20, 4, 128, False, 1)),
    *((4, 4, 2, 16, True, None), (3, 6, 3, 16, False, 6), (2, 2, 1, 16, True, 2)),
)


@cases(qkv_norm_, *QKV_CASES, tolerance=2e-5)
@cases(qkv_norm_, (6, 4, 2, 16, True, 1, bfloat16), tolerance=2**-7)
@full_size_cases(qkv_norm_, (515, 64, 8, 128, False, 1), (8, 32, 4, 128, True, 1), tolerance=1e-5)
def query_and_key_norms(
    g: Generator, d: device, n: int, heads: int, kv_heads: int, head_dim: int, biased: bool, norm_heads: int | None,
    dtype: dtype = float32,
) -> Arguments:  # fmt: skip
    width = (heads + 2 * kv_heads) * head_dim
    bias = randn(g, d, width, dtype=dtype) if biased else None
    if norm_heads is None:
        norms = None
    else:  # of one head, or of all queries and of all keys
        sizes = (head_dim, head_dim) if norm_heads == 1 else (heads * head_dim, kv_heads * head_dim)
        norms = tuple(randn(g, d, size, dtype=dtype) for size in sizes)
    return (randn(g, d, n, width, dtype=dtype), heads, kv_heads, bias, norms, EPS), {}
