"""What moves between host and device in out-of-core training, cut into pieces of a few kinds, and how large they are.

    param grad state    of a unit of weights: a layer's block, or a part of the embedding or of the head
    inp                 a chunk's input of a layer, which is the output of the layer before
    kv                  keys and values of a group in a layer
    attn                a chunk's attention in a layer: output, and log-sum-exp of each row
    rest                queries, stream behind the attention, gate and up products
    dstream             a chunk's gradient on its way back
    dkv                 gradients of a group's keys and values, while its chunks are gone back through

A piece is one stretch of bytes; the tensors in it begin at multiples of 256, in the order given here.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from llmb.config.llama_layer_shapes import aligned, layer_weight_shapes
from llmb.config.offload_plan import Plan
from llmb.config.spec import Model

KINDS = ("param", "grad", "state", "inp", "kv", "attn", "rest", "dstream", "dkv")
OF_UNITS = ("param", "grad", "state")  # kinds that outlive a round
STATE_BYTES = {"master": (2, 4, 4), "stochastic": (2, 2), "nearest": (2, 2)}  # low bits of the master weight; m, v
GRAD_BYTES = {"master": 4, "stochastic": 2, "nearest": 2}


class Piece(NamedTuple):
    """One of them. A unit's has a layer only: its unit's number."""

    kind: str
    layer: int
    group: int = -1
    chunk: int = -1


@dataclass(frozen=True)
class Units:
    """The weights in units, numbered: the layers' blocks, then the parts of the embedding, then those of the head.

    No part is larger than a block, so that all units pass through the same buffers. The norm before the head lies
    behind the last part of the head, or of the embedding where the two are one.
    """

    model: Model

    @cached_property
    def block_numbers(self) -> int:
        """Weights of a unit's buffer, what lies between its tensors included."""
        return numbers_of(layer_weight_shapes(self.model))

    @cached_property
    def parts(self) -> int:
        """Of the embedding, and as many of the head."""
        m = self.model
        return -(-m.vocab * m.hidden // (self.block_numbers - aligned(m.hidden)))

    def part_rows(self, part: int) -> range:
        """The vocabulary's rows in a part."""
        rows = -(-self.model.vocab // self.parts)
        return range(part * rows, min((part + 1) * rows, self.model.vocab))

    @cached_property
    def embedding(self) -> range:
        """Unit numbers."""
        return range(self.model.layers, self.model.layers + self.parts)

    @cached_property
    def head(self) -> range:
        """Unit numbers; with tied embeddings those of the embedding."""
        if self.model.tied_embeddings:
            return self.embedding
        return range(self.embedding.stop, self.embedding.stop + self.parts)

    @cached_property
    def count(self) -> int:
        return self.head.stop

    def tensors(self, unit: int) -> tuple[tuple[int, ...], ...]:
        """Shapes inside a unit, in their order."""
        if unit < self.model.layers:
            return layer_weight_shapes(self.model)
        of = self.head if unit in self.head else self.embedding
        rows = len(self.part_rows(unit - of.start))
        norm = ((self.model.hidden,),) if unit == self.head[-1] else ()
        return ((rows, self.model.hidden), *norm)


def numbers_of(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Numbers of several tensors behind one another, each begun at a multiple of 256 numbers.

    Numbers and not bytes: so a weight, its gradient and its state lie at the same place of their pieces.
    """
    return sum(aligned(prod(shape)) for shape in shapes)


def at_own_homes(plan: Plan) -> tuple[str, ...]:
    """Kinds whose pieces have places of their own at home; all others share what places there are."""
    return OF_UNITS if plan.keeps_gradients else ("param", "state")


def number_bytes(plan: Plan) -> int:
    """Of a number of the stream; with fp8 products it is bf16 all the same."""
    return 4 if plan.dtype == "fp32" else 2


def piece_bytes(model: Model, plan: Plan) -> dict[str, int]:
    """Bytes of a buffer for each kind."""
    each = number_bytes(plan)
    numbers = Units(model).block_numbers
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    rows, context = plan.chunk_tokens, plan.group_tokens
    state = (4, 4) if plan.dtype == "fp32" else STATE_BYTES[plan.update]
    grad = 4 if plan.dtype == "fp32" else GRAD_BYTES[plan.update]
    wide = rows * width * each
    return {
        "param": numbers * each,
        "grad": numbers * grad,
        "state": sum(numbers * size for size in state),
        "inp": aligned(rows * model.hidden * each),
        "kv": 2 * aligned(context * kv_width * each),
        "attn": aligned(wide) + aligned(4 * model.heads * rows),
        "rest": aligned(wide) + aligned(rows * model.hidden * each) + aligned(rows * 2 * model.ffn * each),
        "dstream": aligned(rows * model.hidden * each),
        "dkv": 2 * aligned(4 * context * kv_width),
    }
