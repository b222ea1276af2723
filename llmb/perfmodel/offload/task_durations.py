"""Seconds and FLOPs of every task of an out-of-core step, from its shape and the machine's rates.

Time is spent on gemms, attention and passes over memory, each with its own rate. Attention to a chunk's own keys, half
of which a causal mask hides, and to the keys before it, all of which are visible, have separate rates. FLOPs are those
the device executes: of pairs that the mask leaves, and in backward 2.5 times those in forward. Layers with a sliding
window and full ones count as their mean. A softcap of attention logits has kernels of its own, which are slower.

In fp8 a layer's weights are cast by the first chunk that needs them, once per round and direction
(`fp8_layer_weights.py`). Frozen weights in fp8 are widened by that chunk (`llmb/offload/lora/frozen_weights.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from llmb.config.model import Model
from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.perfmodel.flops import attention_pairs
from llmb.perfmodel.offload.buffers import ParamBuckets, activation_itemsize, buffer_bytes
from llmb.perfmodel.offload.layer_work import LayerWork, layer_work
from llmb.perfmodel.offload.lora_costs import adapter_update_bytes
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.operand_bytes import cast_bytes
from llmb.perfmodel.offload.step_tasks import Chunk, StepTask, round_chunks
from llmb.perfmodel.step_time.fitted_constants import native_constants

BACKWARD_ATTENTION = 2.5  # times the forward FLOPs: five matmuls per pair instead of two


@dataclass(frozen=True)
class TaskCost:
    """Resources that a task needs."""

    gemms: float = 0.0  # FLOPs
    causal: float = 0.0  # forward FLOPs of attention to a chunk's own keys
    rectangle: float = 0.0  # and to the keys before it
    backward_causal: float = 0.0
    backward_rectangle: float = 0.0
    memory_bytes: float = 0.0  # read and written by everything else
    head_gemms: float = 0.0  # FLOPs of gemms that are never in fp8

    @property
    def flops(self) -> float:
        attention = self.causal + self.rectangle + self.backward_causal + self.backward_rectangle
        return self.gemms + self.head_gemms + attention

    def __add__(self, other: "TaskCost") -> "TaskCost":
        return TaskCost(
            self.gemms + other.gemms,
            self.causal + other.causal,
            self.rectangle + other.rectangle,
            self.backward_causal + other.backward_causal,
            self.backward_rectangle + other.backward_rectangle,
            self.memory_bytes + other.memory_bytes,
            self.head_gemms + other.head_gemms,
        )


@dataclass(frozen=True)
class TaskDurations:
    """Durations of the tasks of one model, plan and machine."""

    model: Model
    plan: Plan
    rates: Rates

    def seconds(self, task: StepTask) -> float:
        """Return the duration of a task, recomputation included."""
        return self.seconds_of(self.cost(task))

    def seconds_of(self, cost: TaskCost) -> float:
        rates = self.rates
        gemms = rates.matmul_tflops
        if self.plan.dtype == "fp8" and rates.fp8_tflops is not None:
            gemms = rates.fp8_tflops
        forward, backward = self.causal_tflops
        attention = (
            cost.causal / forward
            + cost.rectangle / rates.past_attention_forward_tflops
            + cost.backward_causal / backward
            + cost.backward_rectangle / rates.past_attention_backward_tflops
        )
        attention *= 1.0 if self.model.attn_logit_softcap is None else native_constants("work")["softcap"]
        matmuls = cost.gemms / gemms + cost.head_gemms / rates.matmul_tflops
        return (matmuls + attention) / 1e12 + cost.memory_bytes / rates.memory_gbs / 1e9

    def cost(self, task: StepTask) -> TaskCost:
        """Return what a task needs."""
        if task.kind == "update":
            return self.update
        assert task.chunk is not None
        if task.kind == "forward":
            return self.forward(task.chunk)
        if task.kind == "backward":
            return self.backward(task.chunk) + self.recompute(task.chunk, task.level) + self.recompute_casts(task)
        if task.kind == "head":
            return self.head(task.chunk)
        passes = 2 if task.kind == "embedding" else 6
        memory_bytes = task.chunk.tokens * self.model.hidden * self.itemsize * passes
        widen = self._widen(self.model.vocab * self.model.hidden, is_first=task.chunk.place == 0)
        return TaskCost(memory_bytes=memory_bytes + widen)

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element of the residual."""
        return activation_itemsize(self.plan)

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Widths of all query heads and of all key heads."""
        return self.model.heads * self.model.head_dim, self.model.kv_heads * self.model.head_dim

    @cached_property
    def matrices(self) -> int:
        """Weights of a plain layer that are cast to fp8, or from it."""
        width, kv_width = self.widths
        return self.model.hidden * (2 * width + 2 * kv_width + 3 * self.model.ffn)

    @cached_property
    def work(self) -> LayerWork:
        return layer_work(self.model, self.plan)

    @cached_property
    def update(self) -> TaskCost:
        """One pass over weights, gradients and state of a bucket; all but the gradients are also written.

        Of LoRA that of all adapters, whose gradients are also read for their norm and cleared.
        """
        if self.plan.lora is not None:
            return TaskCost(memory_bytes=adapter_update_bytes(self.model, self.plan))
        sizes = buffer_bytes(self.model, self.plan)
        return TaskCost(memory_bytes=2 * sizes["param"] + sizes["grad"] + 2 * sizes["state"])

    @cached_property
    def gradient_bytes(self) -> float:
        """Bytes per element of a gradient."""
        return buffer_bytes(self.model, self.plan)["grad"] / ParamBuckets(self.model).bucket_numel

    @cached_property
    def causal_tflops(self) -> tuple[float, float]:
        """Rates forward and backward of causal squares as long as a sequence, or as a chunk where it is shorter."""
        rates, tokens = self.rates, min(self.plan.seqlen, self.plan.chunk_tokens)
        ratio = rates.square_tokens / tokens
        return (
            causal_rate(rates.attention_forward_tflops, rates.past_attention_forward_tflops, ratio),
            causal_rate(rates.attention_backward_tflops, rates.past_attention_backward_tflops, ratio),
        )

    def attention(self, chunk: Chunk) -> tuple[float, float]:
        """Return forward FLOPs for the chunk's own keys and for those before it."""
        windowed = self.model.window_layers / self.model.layers
        both = zip(self._visible_pairs(chunk, None), self._visible_pairs(chunk, self.model.window), strict=True)
        causal, rectangle = ((1 - windowed) * full + windowed * inside for full, inside in both)
        width, _ = self.widths
        return 4.0 * causal * width, 4.0 * rectangle * width

    def _visible_pairs(self, chunk: Chunk, window: int | None) -> tuple[float, float]:
        """Return the pairs of the chunk's queries with its own keys and with those before it."""
        if self.plan.chunks_per_group == 1:
            seqlen = self.plan.seqlen
            return chunk.tokens / seqlen * attention_pairs(seqlen, "causal", window), 0.0
        causal = attention_pairs(chunk.tokens, "causal", window)
        reach = chunk.first + chunk.tokens if window is None else window - 1  # keys before its own that a query sees
        all_seen = min(max(reach - chunk.first, 0), chunk.tokens)  # queries that see all keys before the chunk
        some_seen = max(min(reach, chunk.tokens), all_seen)  # queries that see any of them
        return causal, all_seen * chunk.first + (some_seen - all_seen) * (2 * reach + 1 - all_seen - some_seen) / 2

    def forward(self, chunk: Chunk) -> TaskCost:
        causal, rectangle = self.attention(chunk)
        cast = self._cast(self.matrices, is_first=chunk.place == 0)
        memory_bytes = chunk.tokens * self.work.forward_bytes + cast + self._widen(self.matrices, chunk.place == 0)
        return TaskCost(2.0 * chunk.tokens * self.work.gemm_macs, causal, rectangle, memory_bytes=memory_bytes)

    def recompute(self, chunk: Chunk, level: str) -> TaskCost:
        """Return the cost of recomputing what the level did not save."""
        if level == FULL:
            return TaskCost()
        causal, rectangle = (0.0, 0.0) if level == ATTENTION else self.attention(chunk)
        gemms, memory_bytes = 2.0 * chunk.tokens * self.work.recompute_macs, chunk.tokens * self.work.recompute_bytes
        return TaskCost(gemms, causal, rectangle, memory_bytes=memory_bytes)

    def recompute_casts(self, task: StepTask) -> TaskCost:
        """Return the cost of fp8 casts: backward takes the other layout of the weights, recomputation needs both."""
        assert task.chunk is not None
        begin = task.layer * self.plan.chunks_per_round
        behind = self.plan.levels[begin + task.chunk.place + 1 : begin + self._chunks_in_round(task.chunk)]
        is_first = task.level != FULL and set(behind) <= {FULL}
        all_but_down = self.matrices - self.model.hidden * self.model.ffn
        return TaskCost(memory_bytes=self._cast(all_but_down, is_first))

    def backward(self, chunk: Chunk) -> TaskCost:
        is_first = chunk.place == self._chunks_in_round(chunk) - 1
        cast = self._cast(self.matrices, is_first) + self._widen(self.matrices, is_first)
        causal, rectangle = (BACKWARD_ATTENTION * flops for flops in self.attention(chunk))
        return TaskCost(
            2.0 * chunk.tokens * self.work.backward_macs, backward_causal=causal, backward_rectangle=rectangle,
            memory_bytes=chunk.tokens * self.work.backward_bytes + self.work.gradient_bytes + cast,
        )  # fmt: skip

    def head(self, chunk: Chunk) -> TaskCost:
        m = self.model
        # The logits are written, read twice and written by the loss, and read by two gemms; the weight gradients are
        # read and written for every loss chunk.
        elements, gemms = 4 * m.vocab + 8 * m.hidden, 6.0 if self.plan.lora is None else 4.0
        accumulate = 2.0 * ceil(chunk.tokens / self.plan.loss_tokens) * m.vocab * m.hidden * self.gradient_bytes
        memory_bytes = self._pass_bytes(chunk, elements) + accumulate
        memory_bytes += self._widen(m.vocab * m.hidden, is_first=chunk.place == self._chunks_in_round(chunk) - 1)
        return TaskCost(head_gemms=gemms * chunk.tokens * m.hidden * m.vocab, memory_bytes=memory_bytes)

    def _cast(self, weights: int, is_first: bool) -> int:
        """Return the bytes of casting weights to fp8, if this chunk is the one that does it."""
        return cast_bytes(self.plan) * weights if is_first else 0

    def _widen(self, weights: int, is_first: bool) -> int:
        """Return the bytes of widening frozen weights from fp8, if this chunk is the one that does it."""
        return (1 + self.itemsize) * weights if is_first and self.plan.widens_weights else 0

    def _chunks_in_round(self, chunk: Chunk) -> int:
        """Return the chunks of this chunk's round; the last round may have fewer."""
        is_last = chunk.group // self.plan.groups_per_round == self.plan.rounds - 1
        return self._chunks_in_last_round if is_last else self.plan.chunks_per_round

    @cached_property
    def _chunks_in_last_round(self) -> int:
        return len(round_chunks(self.plan, self.plan.rounds - 1))

    def _pass_bytes(self, chunk: Chunk, elements: float) -> float:
        return chunk.tokens * elements * self.itemsize


def causal_rate(measured: float, rectangle: float, ratio: float) -> float:
    """Return the rate of a causal square of attention, where one that is `ratio` times as long was measured.

    A square is slower than a rectangle because of its diagonal, where half of every tile is computed for nothing: a
    constant time per query, so that longer squares lose less.
    """
    diagonal = max(0.0, 1 / measured - 1 / rectangle)
    return 1 / (1 / measured + (ratio - 1) * diagonal)
