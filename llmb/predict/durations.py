"""Seconds and FLOPs of every computation of an out-of-core step, from its shape and the machine's rates.

Work is of three sorts, each with its own rate: matrix products, attention, and passes over memory. FLOPs are those the
device executes: attention counts the pairs that a causal mask leaves, and its backward pass 2.5 times its forward.
"""

from dataclasses import dataclass
from functools import cached_property

from llmb.plan import ATTENTION, FULL, Plan
from llmb.predict.pieces import Units, number_bytes, piece_bytes
from llmb.predict.rates import Rates
from llmb.predict.work import Chunk, Work
from llmb.spec import Model

BACKWARD_ATTENTION = 2.5  # of the forward's FLOPs: five products of each pair instead of two


@dataclass(frozen=True)
class Cost:
    """What a computation needs of each sort."""

    products: float = 0.0  # FLOPs
    attention: float = 0.0  # FLOPs of attention going forward
    backward_attention: float = 0.0
    passed: float = 0.0  # bytes read and written by all that is neither

    @property
    def flops(self) -> float:
        return self.products + self.attention + self.backward_attention

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.products + other.products,
            self.attention + other.attention,
            self.backward_attention + other.backward_attention,
            self.passed + other.passed,
        )


@dataclass(frozen=True)
class Durations:
    """Of one model, plan and machine."""

    model: Model
    plan: Plan
    rates: Rates

    def seconds(self, work: Work) -> float:
        """Of one computation, what it computes again included."""
        return self.seconds_of(self.cost(work))

    def seconds_of(self, cost: Cost) -> float:
        rates = self.rates
        products = rates.matmul_tflops
        if self.plan.dtype == "fp8" and rates.fp8_tflops is not None:
            products = rates.fp8_tflops
        return (
            cost.products / products / 1e12
            + cost.attention / rates.attention_forward_tflops / 1e12
            + cost.backward_attention / rates.attention_backward_tflops / 1e12
            + cost.passed / rates.memory_gbs / 1e9
        )

    def cost(self, work: Work) -> Cost:
        """Of one computation."""
        if work.kind == "update":
            return self.update
        assert work.chunk is not None
        if work.kind == "forward":
            return self.forward(work.chunk)
        if work.kind == "backward":
            return self.backward(work.chunk) + self.recompute(work.chunk, work.level)
        if work.kind == "head":
            return self.head(work.chunk)
        return Cost(passed=work.chunk.tokens * self.model.hidden * self.each * (2 if work.kind == "embedding" else 6))

    @cached_property
    def each(self) -> int:
        """Bytes a number of the stream."""
        return number_bytes(self.plan)

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Of queries, and of keys."""
        return self.model.heads * self.model.head_dim, self.model.kv_heads * self.model.head_dim

    @cached_property
    def matrices(self) -> int:
        """Weights of a block that every token is multiplied with."""
        width, kv_width = self.widths
        return self.model.hidden * (2 * width + 2 * kv_width + 3 * self.model.ffn)

    @cached_property
    def update(self) -> Cost:
        """One pass over weights, gradients and state of a unit; all but the gradients are written, too."""
        sizes = piece_bytes(self.model, self.plan)
        return Cost(passed=2 * sizes["param"] + sizes["grad"] + 2 * sizes["state"])

    def pairs(self, chunk: Chunk) -> float:
        """(query, key) pairs that a causal mask leaves."""
        if self.plan.chunks_per_group > 1:
            return chunk.tokens * chunk.first + chunk.tokens**2 / 2
        return chunk.tokens * self.plan.seqlen / 2

    def forward(self, chunk: Chunk) -> Cost:
        m, (width, kv_width) = self.model, self.widths
        # Two norms and two sums with the stream; the rotation, in place; the activation.
        passes = 2 * 2 * m.hidden + 2 * 3 * m.hidden + 2 * (width + kv_width) + 3 * m.ffn
        return Cost(
            2.0 * chunk.tokens * self.matrices, 4.0 * self.pairs(chunk) * width, 0.0, self._passed(chunk, passes)
        )

    def recompute(self, chunk: Chunk, level: str) -> Cost:
        """What the level did not keep."""
        if level == FULL:
            return Cost()
        m, (width, _) = self.model, self.widths
        products = 2.0 * chunk.tokens * m.hidden * (2 * width + 2 * m.ffn)
        attention = 0.0 if level == ATTENTION else 4.0 * self.pairs(chunk) * width
        return Cost(products, attention, 0.0, self._passed(chunk, 2 * 2 * m.hidden + 3 * m.hidden + 2 * width))

    def backward(self, chunk: Chunk) -> Cost:
        m, (width, kv_width) = self.model, self.widths
        # Both norms again and their backward passes, the activation's in place, the rotation's, sums of dk and dv;
        # every gradient is read and written once more as the sum that it is added to.
        passes = 2 * (2 + 4) * m.hidden + 6 * m.ffn + 2 * (width + kv_width) + 2 * kv_width * 4
        sums = 2.0 * self.matrices * (piece_bytes(m, self.plan)["grad"] / Units(m).block_numbers)
        attention = BACKWARD_ATTENTION * 4.0 * self.pairs(chunk) * width
        return Cost(4.0 * chunk.tokens * self.matrices, 0.0, attention, self._passed(chunk, passes) + sums)

    def head(self, chunk: Chunk) -> Cost:
        m = self.model
        # The logits are written, read twice and written by the loss, and read by two products.
        passes = 4 * m.vocab + 8 * m.hidden
        return Cost(products=6.0 * chunk.tokens * m.hidden * m.vocab, passed=self._passed(chunk, passes))

    def _passed(self, chunk: Chunk, numbers: float) -> float:
        return chunk.tokens * numbers * self.each
