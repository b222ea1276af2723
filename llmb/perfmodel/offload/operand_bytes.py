"""Bytes a token that a block reads and writes to make what its products take: norms, activation, casts to 8 bits.

    operand_bytes(model, plan).backward

Counted from the device side's `linears.py` and `fp8_linears.py`, pass by pass; what a product itself reads and writes
is in its own rate. In 8 bits a tensor is read in bf16 and written in one byte for each form that is asked for: `rows`
for products over channels, `columns` for those over tokens. A norm into columns reads its rows twice, since the tiles
that it writes hold no whole one.
"""

from typing import NamedTuple

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import number_bytes

CAST = 2 + 1  # bytes of a number: read in 16 bits, written in one form
CAST_BOTH = 2 + 1 + 1


class OperandBytes(NamedTuple):
    """Going forward, what levels that keep not everything do again, and going back, where norms have their own way."""

    forward: int
    again: int
    backward: int


def operand_bytes(model: Model, plan: Plan) -> OperandBytes:
    """In the plan's format."""
    return _fp8(model) if plan.dtype == "fp8" else _plain(model, number_bytes(plan))


def _plain(model: Model, each: int) -> OperandBytes:
    """Norms read and write, their way back reads three and writes one; the activation's is in place."""
    norms = 2 * 2 * model.hidden
    return OperandBytes(
        forward=each * (norms + 3 * model.ffn),
        again=each * norms,
        backward=each * (norms + 2 * 4 * model.hidden + 6 * model.ffn),
    )


def _fp8(model: Model) -> OperandBytes:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms, attention = 2 * CAST * model.hidden, CAST * width
    norms_in_columns = 2 * (2 + CAST) * model.hidden
    norms_back = 2 * 2 * 4 * model.hidden
    slopes_of_stream = 2 * CAST_BOTH * model.hidden  # behind the MLP, and behind the attention
    slopes_of_qkv = CAST_BOTH * (width + 2 * kv_width)
    activation = 2 * 2 * model.ffn + model.ffn
    # Reads the activation's slope, gate and up; writes the slopes of these two in both forms, the activation in one.
    activation_back = 2 * 3 * model.ffn + 2 * 2 * model.ffn + model.ffn
    return OperandBytes(
        forward=norms + attention + activation,
        again=norms + attention,
        backward=norms_in_columns + norms_back + attention + slopes_of_stream + slopes_of_qkv + activation_back,
    )
