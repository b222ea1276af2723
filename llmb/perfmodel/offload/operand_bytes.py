"""Bytes per token that a layer reads and writes to produce gemm operands: norms, activation function, casts to fp8.

    operand_bytes(model, plan).backward

Counted pass by pass from `linears.py` and `fp8_linears.py`; what a gemm itself reads and writes is part of its rate. In
fp8 a tensor is read in bf16 and written in one byte per layout: row-major for gemms over channels, transposed for those
over tokens. A norm with transposed output reads its rows twice, since the tiles that it writes hold no whole row. With
many scales per tensor (`scaled_linears.py`) norms and activation write bf16, and casts are passes of their own: rowwise
reads a tensor twice, to find the largest magnitudes first, blockwise once.
"""

from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.perfmodel.offload.buffers import activation_itemsize

CAST = 2 + 1  # bytes per element: read in 16 bits, written in one layout
CAST_BOTH = 2 + 1 + 1
FIRST_PASS = {"rowwise": 2, "blockwise": 0}  # more bytes per element, by recipe with many scales


class OperandBytes(NamedTuple):
    """Bytes in forward, in recomputation (levels that do not save everything), and in backward with the norms' own."""

    forward: int
    recompute: int
    backward: int


def operand_bytes(model: Model, plan: Plan) -> OperandBytes:
    """Return the bytes for the plan's dtype and recipe."""
    if plan.fp8_recipe in FIRST_PASS:
        return _many_scales(model, FIRST_PASS[plan.fp8_recipe])
    return _fp8(model) if plan.dtype == "fp8" else _plain(model, activation_itemsize(plan))


def cast_bytes(plan: Plan) -> int:
    """Return the bytes per weight that is cast to one layout; 0 where no weight is."""
    return 0 if plan.dtype != "fp8" else CAST + FIRST_PASS.get(plan.fp8_recipe or "", 0)


def _many_scales(model: Model, first_pass: int) -> OperandBytes:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    cast, cast_both = CAST + first_pass, CAST_BOTH + first_pass
    norms, attention = 2 * (2 * 2 + cast) * model.hidden, cast * width
    activation = (2 * 3 + cast) * model.ffn
    d_residuals, d_qkv = 2 * cast_both * model.hidden, cast_both * (width + 2 * kv_width)
    # Reads the gradient of act, gate and up, writes gradients of these two and act; then casts them.
    activation_backward = 2 * 6 * model.ffn + cast_both * 2 * model.ffn + cast * model.ffn
    norms_backward = 2 * 2 * 4 * model.hidden
    return OperandBytes(
        forward=norms + attention + activation,
        recompute=norms + attention,
        backward=norms + norms_backward + attention + d_residuals + d_qkv + activation_backward,
    )


def _plain(model: Model, itemsize: int) -> OperandBytes:
    """Norms read and write, their backward reads three and writes one; that of the activation is in place."""
    norms = 2 * 2 * model.hidden
    return OperandBytes(
        forward=itemsize * (norms + 3 * model.ffn),
        recompute=itemsize * norms,
        backward=itemsize * (norms + 2 * 4 * model.hidden + 6 * model.ffn),
    )


def _fp8(model: Model) -> OperandBytes:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms, attention = 2 * CAST * model.hidden, CAST * width
    transposed_norms = 2 * (2 + CAST) * model.hidden
    norms_backward = 2 * 2 * 4 * model.hidden
    d_residuals = 2 * CAST_BOTH * model.hidden  # after the MLP, and after the attention
    d_qkv = CAST_BOTH * (width + 2 * kv_width)
    activation = 2 * 2 * model.ffn + model.ffn
    # Reads the gradient of act, gate and up; writes the gradients of these two in both layouts, act in one.
    activation_backward = 2 * 3 * model.ffn + 2 * 2 * model.ffn + model.ffn
    return OperandBytes(
        forward=norms + attention + activation,
        recompute=norms + attention,
        backward=transposed_norms + norms_backward + attention + d_residuals + d_qkv + activation_backward,
    )
