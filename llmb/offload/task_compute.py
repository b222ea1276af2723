"""What each kind of work of a step computes, on buffers of the arena.

    computation = Computation(model, plan, arena, figures, rope_rows, seed)
    executor.follow(program, computation.of(groups, AdamStep(number=3, lr=1e-4)))

What a computation uses beside its buffers comes from torch's allocator and goes back before the next begins. Nothing
here waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import aligned
from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.config.spec import Model
from llmb.models.llama_layer.fp8_layer_weights import Fp8Layer, Fp8Weights, Way
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer import Block
from llmb.models.llama_layer.layer_tensors import Attn, BlockWeights, KeyValues, Rest
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.arena import Arena
from llmb.offload.buffer_views import attn_of, kv_of, rest_of, stream_of, unit_tensors
from llmb.offload.chunked_batches import GroupBatch
from llmb.offload.executor import Compute
from llmb.offload.offload_dtypes import formats_of
from llmb.offload.step_figures import Figures
from llmb.offload.vocab_ends import embed, embed_backward, head_loss
from llmb.ops.optim.adam import adam_update
from llmb.perfmodel.offload.buffers import Piece, Units
from llmb.perfmodel.offload.program import Operation
from llmb.perfmodel.offload.step_tasks import Chunk
from llmb.perfmodel.offload.workspace import KEYS_AT_ONCE
from llmb.runtime.adamw_defaults import BETAS, EPS, WEIGHT_DECAY

Shapes = tuple[tuple[int, ...], ...]
RopeRows = Callable[[GroupBatch, slice], tuple[Tensor, Tensor]]  # cosine and sine of some tokens of a group
MATRICES = 4  # of a block: its first tensors; those of the vocabulary have one


class AdamStep(NamedTuple):
    """The update of a step."""

    number: int  # from 1
    lr: float


class Computation:
    """Of one run."""

    def __init__(self, model: Model, plan: Plan, arena: Arena, figures: Figures, rope_rows: RopeRows, seed: int):
        self.model, self.plan, self.arena, self.figures = model, plan, arena, figures
        self.rope_rows, self.seed = rope_rows, seed
        self.units, self.formats = Units(model), formats_of(plan)
        self.fp8 = Fp8Weights(model, arena.device) if plan.dtype == "fp8" else None
        self.block: Block[Any] = Block(model, PlainLinears if self.fp8 is None else Fp8Linears, KEYS_AT_ONCE)
        self._views: dict[tuple[str, int, Shapes], list[Tensor]] = {}  # of buffers, each made once

    def of(self, groups: Sequence[GroupBatch], update: AdamStep) -> Compute:
        """Computes any operation of a step of these groups, or its updates."""
        return lambda operation: self._compute(operation, groups, update)

    def _compute(self, operation: Operation, groups: Sequence[GroupBatch], update: AdamStep) -> None:
        work = operation.work
        if work.chunk is None:
            return self._update(operation, update)
        batch = groups[work.chunk.group]
        match work.kind:
            case "embedding":
                self._embed(operation, work.chunk, batch)
            case "forward":
                self._forward(operation, work.chunk, batch)
            case "head":
                self._head(operation, work.chunk, batch)
            case "backward":
                self._backward(operation, work.chunk, batch)
            case "embedding_backward":
                self._embed_backward(operation, work.chunk, batch)
        if work.last:
            done = [piece for piece in (*work.makes, *work.changes) if piece.kind == "grad"]
            self.figures.add_gradients([tensor for piece in done for tensor in self._unit(operation, piece)])

    def _embed(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        if self.fp8 is not None and operation.work.round == chunk.place == 0:  # a step begins
            self.fp8.scales.roll()
        parts = [self._unit(operation, Piece("param", unit))[0] for unit in self.units.embedding]
        embed(batch.tokens_T[_rows(chunk)], parts, self._stream(operation, "inp", 0))

    def _forward(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        layer, group, number = operation.work.layer, chunk.group, chunk.number
        kept = operation.buffers
        attn, rest = Piece("attn", layer, group, number), Piece("rest", layer, group, number)
        self.block.forward(
            self._weights(operation, "forward"),
            self._stream(operation, "inp", layer),
            self._kv(operation, Piece("kv", layer, group)),
            batch.spans[number],
            *self._cos_sin(chunk, batch),
            self._stream(operation, "inp", layer + 1),
            self._attn(self._bytes(operation, attn), chunk) if attn in kept else None,
            self._rest(self._bytes(operation, rest), chunk) if rest in kept else None,
        )

    def _head(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        params, grads = ([self._unit(operation, Piece(kind, unit)) for unit in self.units.head]
                         for kind in ("param", "grad"))  # fmt: skip
        losses_N = torch.empty(chunk.tokens, device=self.arena.device)
        head_loss(
            self._stream(operation, "inp", self.model.layers), params[-1][1], self.model.norm_eps,
            [part[0] for part in params], batch.labels_T[_rows(chunk)], 1 / batch.counted,
            self._stream(operation, "dstream", -1), [part[0] for part in grads], grads[-1][1],
            self._is_fresh(operation, self.units.head), losses_N, self.plan.loss_tokens,
        )  # fmt: skip
        self.figures.add_losses(losses_N)

    def _backward(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        work, group, number = operation.work, chunk.group, chunk.number
        weights, inp_NC = self._weights(operation, "backward"), self._stream(operation, "inp", work.layer)
        kv = self._kv(operation, Piece("kv", work.layer, group))
        spans, cos_sin = batch.spans[number], self._cos_sin(chunk, batch)
        attn = self._attn(self._kept_or_new(operation, Piece("attn", work.layer, group, number)), chunk)
        rest = self._rest(self._kept_or_new(operation, Piece("rest", work.layer, group, number)), chunk)
        if work.level != FULL:
            self.block.recompute(weights, inp_NC, kv, spans, *cos_sin, attn, rest, attn_saved=work.level == ATTENTION)
        dkv = Piece("dkv", -1, group)
        self.block.backward(
            weights, self._block(operation, "grad"), self._is_fresh(operation, range(work.layer, work.layer + 1)),
            inp_NC, kv, attn, rest, self._kv(operation, dkv), dkv in work.makes, spans, *cos_sin,
            self._stream(operation, "dstream", -1),
        )  # fmt: skip

    def _embed_backward(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        grads = [self._unit(operation, Piece("grad", unit))[0] for unit in self.units.embedding]
        dstream_NC = self._stream(operation, "dstream", -1)
        fresh = self._is_fresh(operation, self.units.embedding)
        embed_backward(dstream_NC, batch.tokens_T[_rows(chunk)], grads, fresh)

    def _update(self, operation: Operation, update: AdamStep) -> None:
        """Matrices in one pass with what lies between them, norms in another: these do not decay."""
        unit = operation.work.layer
        param, grad, state = (self._bytes(operation, Piece(kind, unit)) for kind in ("param", "grad", "state"))
        if operation.work.fresh:
            state.zero_()
        weights, gradients, kept = self.formats.weights(param), self.formats.grads(grad), self.formats.state(state)
        factor = self.figures.factor if self.plan.update_at == "forward" else self.figures.factor_so_far()
        for number, (some, decay) in enumerate(self._stretches(unit)):
            low = None if kept.low is None else kept.low[some]
            adam_update(
                weights[some], gradients[some], kept.m[some], kept.v[some], low, lr=update.lr, beta1=BETAS[0],
                beta2=BETAS[1], eps=EPS, decay=decay, step=update.number, factor=factor,
                rounding=self.formats.rounding, seed=((self.seed << 24) + update.number << 16) + 2 * unit + number,
            )  # fmt: skip

    def _stretches(self, unit: int) -> list[tuple[slice, float]]:
        """The numbers of a unit that decay, and those that do not."""
        sizes = [aligned(torch.Size(shape).numel()) for shape in self.units.tensors(unit)]
        matrices = MATRICES if unit < self.model.layers else 1
        border, end = sum(sizes[:matrices]), sum(sizes)
        found = [(slice(0, border), WEIGHT_DECAY), (slice(border, end), 0.0)]
        return found if end > border else found[:1]

    def _is_fresh(self, operation: Operation, units: range) -> bool:
        """Whether these gradients begin here; all of them do, or none."""
        return Piece("grad", units[0]) in operation.work.makes

    def _bytes(self, operation: Operation, piece: Piece) -> Tensor:
        return self.arena.buffer(piece.kind, operation.buffers[piece])

    def _kept_or_new(self, operation: Operation, piece: Piece) -> Tensor:
        if piece in operation.buffers:
            return self._bytes(operation, piece)
        return torch.empty(self.arena.sizes[piece.kind], dtype=torch.uint8, device=self.arena.device)

    def _unit(self, operation: Operation, piece: Piece) -> list[Tensor]:
        """A unit's weights or gradients."""
        key = (piece.kind, operation.buffers[piece], self.units.tensors(piece.layer))
        if key not in self._views:
            numbers = self.formats.weights if piece.kind == "param" else self.formats.grads
            self._views[key] = unit_tensors(numbers(self._bytes(operation, piece)), key[2])
        return self._views[key]

    def _weights(self, operation: Operation, way: Way) -> BlockWeights | Fp8Layer:
        """Of a layer, as its linear layers take them."""
        weights = self._block(operation, "param")
        return weights if self.fp8 is None else self.fp8.of(operation.work.layer, way, weights)

    def _block(self, operation: Operation, kind: str) -> BlockWeights:
        return BlockWeights(*self._unit(operation, Piece(kind, operation.work.layer)))

    def _stream(self, operation: Operation, kind: str, layer: int) -> Tensor:
        chunk = operation.work.chunk
        assert chunk is not None
        piece = Piece(kind, layer, chunk.group, chunk.number)
        return stream_of(self._bytes(operation, piece), self.model, chunk.tokens, self.formats.stream)

    def _kv(self, operation: Operation, piece: Piece) -> KeyValues:
        dtype = torch.float32 if piece.kind == "dkv" else self.formats.stream
        return kv_of(self._bytes(operation, piece), self.model, self.plan.group_tokens, dtype)

    def _attn(self, memory: Tensor, chunk: Chunk) -> Attn:
        return attn_of(memory, self.model, chunk.tokens, self.formats.stream)

    def _rest(self, memory: Tensor, chunk: Chunk) -> Rest:
        return rest_of(memory, self.model, chunk.tokens, self.formats.stream)

    def _cos_sin(self, chunk: Chunk, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        return self.rope_rows(batch, _rows(chunk))


def _rows(chunk: Chunk) -> slice:
    """Of its group."""
    return slice(chunk.first, chunk.first + chunk.tokens)
