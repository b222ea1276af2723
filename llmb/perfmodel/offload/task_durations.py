"""Seconds and FLOPs of every computation of an out-of-core step, from its shape and the machine's rates.

Work is of three sorts, each with its own rate: matrix products, attention, and passes over memory. Attention to a
chunk's own keys, half of which a causal mask hides, and to those before it, all of which are seen, have rates of their
own. FLOPs are those the device executes: of pairs that the mask leaves, and going back 2.5 times those going forward.

In fp8 a layer's weights are cast by the first chunk that needs them, once a round and direction (`fp8_layer_weights.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import Units, number_bytes, piece_bytes
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.operand_bytes import CAST, OperandBytes, operand_bytes
from llmb.perfmodel.offload.step_tasks import Chunk, Work, chunks_of

BACKWARD_ATTENTION = 2.5  # of the forward's FLOPs: five products of each pair instead of two


@dataclass(frozen=True)
class Cost:
    """What a computation needs of each sort."""

    products: float = 0.0  # FLOPs
    squares: float = 0.0  # FLOPs of attention to a chunk's own keys, going forward
    past: float = 0.0  # and to the keys before it
    backward_squares: float = 0.0
    backward_past: float = 0.0
    passed: float = 0.0  # bytes read and written by all that is neither
    of_head: float = 0.0  # FLOPs of products that are never in 8 bits

    @property
    def flops(self) -> float:
        attention = self.squares + self.past + self.backward_squares + self.backward_past
        return self.products + self.of_head + attention

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.products + other.products,
            self.squares + other.squares,
            self.past + other.past,
            self.backward_squares + other.backward_squares,
            self.backward_past + other.backward_past,
            self.passed + other.passed,
            self.of_head + other.of_head,
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
        forward, backward = self.squares_tflops
        return (
            cost.products / products / 1e12
            + cost.of_head / rates.matmul_tflops / 1e12
            + cost.squares / forward / 1e12
            + cost.past / rates.past_attention_forward_tflops / 1e12
            + cost.backward_squares / backward / 1e12
            + cost.backward_past / rates.past_attention_backward_tflops / 1e12
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
            return self.backward(work.chunk) + self.recompute(work.chunk, work.level) + self.casts_again(work)
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
    def operands(self) -> OperandBytes:
        return operand_bytes(self.model, self.plan)

    @cached_property
    def update(self) -> Cost:
        """One pass over weights, gradients and state of a unit; all but the gradients are written, too."""
        sizes = piece_bytes(self.model, self.plan)
        return Cost(passed=2 * sizes["param"] + sizes["grad"] + 2 * sizes["state"])

    @cached_property
    def gradient_bytes(self) -> float:
        """Of one number."""
        return piece_bytes(self.model, self.plan)["grad"] / Units(self.model).block_numbers

    @cached_property
    def squares_tflops(self) -> tuple[float, float]:
        """Forward and back, of squares as long as a sequence, or as a chunk where a sequence has several."""
        rates, tokens = self.rates, min(self.plan.seqlen, self.plan.chunk_tokens)
        share = rates.square_tokens / tokens
        return (
            _square_tflops(rates.attention_forward_tflops, rates.past_attention_forward_tflops, share),
            _square_tflops(rates.attention_backward_tflops, rates.past_attention_backward_tflops, share),
        )

    def attention(self, chunk: Chunk) -> tuple[float, float]:
        """FLOPs going forward, of the chunk's own keys and of those before it."""
        several = self.plan.chunks_per_group > 1
        own = chunk.tokens * (chunk.tokens if several else self.plan.seqlen) / 2
        past = chunk.tokens * chunk.first if several else 0
        width, _ = self.widths
        return 4.0 * own * width, 4.0 * past * width

    def forward(self, chunk: Chunk) -> Cost:
        m, (width, kv_width) = self.model, self.widths
        # Two sums with the stream; the rotation, in place.
        passes = 2 * 3 * m.hidden + 2 * (width + kv_width)
        passed = self._passed(chunk, passes) + chunk.tokens * self.operands.forward
        squares, past = self.attention(chunk)
        cast = self._cast(self.matrices, is_first=chunk.place == 0)
        return Cost(2.0 * chunk.tokens * self.matrices, squares, past, passed=passed + cast)

    def recompute(self, chunk: Chunk, level: str) -> Cost:
        """What the level did not keep."""
        if level == FULL:
            return Cost()
        m, (width, _) = self.model, self.widths
        products = 2.0 * chunk.tokens * m.hidden * (2 * width + 2 * m.ffn)
        squares, past = (0.0, 0.0) if level == ATTENTION else self.attention(chunk)
        passes = 3 * m.hidden + 2 * width
        passed = self._passed(chunk, passes) + chunk.tokens * self.operands.again
        return Cost(products, squares, past, passed=passed)

    def casts_again(self, work: Work) -> Cost:
        """Going back takes weights in another form than going forward; what is computed again takes both."""
        assert work.chunk is not None
        begin = work.layer * self.plan.chunks_per_round
        behind = self.plan.levels[begin + work.chunk.place + 1 : begin + self._chunks_in_round(work.chunk)]
        is_first = work.level != FULL and set(behind) <= {FULL}
        all_but_down = self.matrices - self.model.hidden * self.model.ffn
        return Cost(passed=self._cast(all_but_down, is_first))

    def backward(self, chunk: Chunk) -> Cost:
        width, kv_width = self.widths
        # The rotation's way back, sums of dk and dv; every gradient is read and written once more as the sum that it is
        # added to. In fp8 that is a pass of its own, which also reads what is added.
        passes = 2 * (width + kv_width) + 2 * kv_width * 4
        passed = self._passed(chunk, passes) + chunk.tokens * self.operands.backward
        sums = (3.0 if self.plan.dtype == "fp8" else 2.0) * self.matrices * self.gradient_bytes
        cast = self._cast(self.matrices, is_first=chunk.place == self._chunks_in_round(chunk) - 1)
        squares, past = (BACKWARD_ATTENTION * flops for flops in self.attention(chunk))
        return Cost(
            4.0 * chunk.tokens * self.matrices, backward_squares=squares, backward_past=past,
            passed=passed + sums + cast,
        )  # fmt: skip

    def head(self, chunk: Chunk) -> Cost:
        m = self.model
        # The logits are written, read twice and written by the loss, and read by two products; the gradients are read
        # and written for every few tokens whose logits exist at once.
        passes = 4 * m.vocab + 8 * m.hidden
        sums = 2.0 * ceil(chunk.tokens / self.plan.loss_tokens) * m.vocab * m.hidden * self.gradient_bytes
        return Cost(of_head=6.0 * chunk.tokens * m.hidden * m.vocab, passed=self._passed(chunk, passes) + sums)

    def _cast(self, weights: int, is_first: bool) -> int:
        """Bytes of bringing weights to 8 bits, where this chunk is the one that does."""
        return CAST * weights if is_first and self.plan.dtype == "fp8" else 0

    def _chunks_in_round(self, chunk: Chunk) -> int:
        """Of the chunk's own, which may be the last and have fewer."""
        is_last = chunk.group // self.plan.groups_per_round == self.plan.rounds - 1
        return self._chunks_in_last_round if is_last else self.plan.chunks_per_round

    @cached_property
    def _chunks_in_last_round(self) -> int:
        return len(chunks_of(self.plan, self.plan.rounds - 1))

    def _passed(self, chunk: Chunk, numbers: float) -> float:
        return chunk.tokens * numbers * self.each


def _square_tflops(measured: float, past: float, share: float) -> float:
    """Of a causal square, where one that is `share` times as long was measured.

    A square is slower than a rectangle by what its diagonal takes, where half of every tile is computed for nothing: so
    much a query, and the longer the square, the less of it.
    """
    diagonal = max(0.0, 1 / measured - 1 / past)
    return 1 / (1 / measured + (share - 1) * diagonal)
