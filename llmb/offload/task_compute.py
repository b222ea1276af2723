"""Computation of each kind of task of a step, on buffers of the arena.

    runner = TaskRunner(model, plan, arena, stats, rope_rows, seed)
    executor.run(program, runner.bind(groups, AdamStep(number=3, lr=1e-4)))

What a task needs besides its buffers comes from torch's allocator and is freed before the next begins. Nothing here
waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned, has_llama_layers, layer_weight_shapes
from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.models.autograd_layer import AutogradLayer
from llmb.models.llama_layer.fp8_layer_weights import PassName, QuantizedLayerWeights
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.layer_recipes import LAYER_RECIPES, Fp8ModelWeights
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights, SavedActivations
from llmb.models.llama_layer.linears import PlainLinears
from llmb.models.llama_layer.lora_linears import LoraLinears
from llmb.offload.arena import Arena
from llmb.offload.buffer_views import (
    attn_view,
    bucket_tensors,
    kv_view,
    offload_dtypes,
    residual_view,
    saved_activations_view,
)
from llmb.offload.chunked_batches import GroupBatch
from llmb.offload.executor import Compute
from llmb.offload.lora.adapter_state import AdamStep, AdapterState
from llmb.offload.lora.frozen_weights import WidenedWeights
from llmb.offload.vocab_ends import embed, embed_backward, head_loss
from llmb.ops.optim.adam import adam_update
from llmb.perfmodel.offload.buffers import BufferKey, ParamBuckets
from llmb.perfmodel.offload.layer_params import layer_param_shapes
from llmb.perfmodel.offload.program import Operation
from llmb.perfmodel.offload.step_tasks import Chunk
from llmb.perfmodel.offload.workspace import KEY_BLOCK
from llmb.runtime.adamw_settings import BETAS, EPS, WEIGHT_DECAY

Shapes = tuple[tuple[int, ...], ...]
RopeRows = Callable[[GroupBatch, slice, str], tuple[Tensor, Tensor]]  # cosine and sine of some tokens, kind of layer


class StepStats:
    """Loss and gradient norm of a step, accumulated on the device and read much later.

        stats.reset()
        stats.add_losses(losses_N); stats.add_gradients(tensors)
        stats.finish(num_labels, out)               # out: on the host, valid once the device gets there

    The gradients' scale factor follows from them. It is NaN if anything is not finite, and then nothing is updated. The
    factor is that of the previous step until `finish`.
    """

    def __init__(self, device: torch.device, clip: float | None):
        self.clip = clip
        self._loss, self._squares, self.factor = torch.zeros(3, device=device).unbind()

    def reset(self) -> None:
        """Begin a step."""
        self._loss.zero_()
        self._squares.zero_()

    def add_losses(self, losses_N: Tensor) -> None:
        """Add the losses of some tokens."""
        self._loss += losses_N.sum()

    def add_gradients(self, gradients: list[Tensor]) -> None:
        """Add the norms of complete gradients."""
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        self._squares += torch.stack(norms).square_().sum()

    def finish(self, num_labels: int, out: Tensor) -> None:
        """Copy mean loss and norm to the host, and set the factor of the step's update."""
        out.copy_(torch.stack((self._loss / num_labels, self._squares.sqrt())), non_blocking=True)
        self.factor.copy_(self.final_factor())

    def final_factor(self) -> Tensor:
        """Return the factor of a step whose gradients are all added."""
        norm = self._squares.sqrt()
        unclipped = self._one_if_finite(norm + self._loss)
        return unclipped if self.clip is None else (self.clip / (norm + 1e-6)).clamp_(max=1.0) * unclipped

    def provisional_factor(self) -> Tensor:
        """Return the factor of updates before the step is done: 1, as long as everything so far is finite."""
        return self._one_if_finite(self._squares + self._loss)

    def _one_if_finite(self, value: Tensor) -> Tensor:
        """Return 1 if a value is finite, else NaN."""
        return value * 0.0 + 1.0


class TaskRunner:
    """Computation of the tasks of one run."""

    def __init__(self, model: Model, plan: Plan, arena: Arena, stats: StepStats, rope_rows: RopeRows, seed: int):
        self.model, self.plan, self.arena, self.stats = model, plan, arena, stats
        self.rope_rows, self.seed = rope_rows, seed
        self.buckets, self.dtypes = ParamBuckets(model), offload_dtypes(plan)
        self.weight_names = [*layer_weight_shapes(model)]
        self.fp8 = None if plan.recipe is None else Fp8ModelWeights(model, arena.device, plan.recipe)
        self.adapters = AdapterState(model, plan, arena.buffer("adapters", 0)) if plan.lora is not None else None
        self.widened = WidenedWeights(model, self.dtypes.activation, arena.device) if plan.widens_weights else None
        linears: Any = PlainLinears if plan.recipe is None else LAYER_RECIPES[plan.recipe].linears
        linears = linears if self.adapters is None else LoraLinears
        self.layers: dict[str, LlamaLayer[Any]] = {}  # by letter of the attention pattern; or else
        self.autograd_layers: dict[str, AutogradLayer] = {}
        for kind in set(model.attention_pattern):
            if has_llama_layers(model):
                self.layers[kind] = LlamaLayer(model, linears, KEY_BLOCK, kind=kind)
            else:
                self.autograd_layers[kind] = AutogradLayer(model, [*layer_param_shapes(model)], kind, KEY_BLOCK)
        self._views: dict[tuple[str, int, Shapes], list[Tensor]] = {}  # of buffers, each created once

    def bind(self, groups: Sequence[GroupBatch], update: AdamStep) -> Compute:
        """Return what computes any operation of a step of these groups, or its updates."""
        return lambda operation: self._compute(operation, groups, update)

    def _compute(self, operation: Operation, groups: Sequence[GroupBatch], update: AdamStep) -> None:
        task = operation.task
        if task.chunk is None:
            return self._update(operation, update)
        batch = groups[task.chunk.group]
        match task.kind:
            case "embedding":
                self._embed(operation, task.chunk, batch)
            case "forward":
                self._forward(operation, task.chunk, batch)
            case "head":
                self._head(operation, task.chunk, batch)
            case "backward":
                self._backward(operation, task.chunk, batch)
            case "embedding_backward":
                self._embed_backward(operation, task.chunk, batch)
        if task.last:
            complete = [key for key in (*task.makes, *task.changes) if key.kind == "grad"]
            self.stats.add_gradients([tensor for key in complete for tensor in self._bucket(operation, key)])

    def _embed(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        if operation.task.round == chunk.place == 0:  # a step begins
            if self.fp8 is not None:
                self.fp8.scales.update()
            if self.adapters is not None:
                self.adapters.begin_step()
        shards = [tensors[0] for tensors in self._params(operation, self.buckets.embedding)]
        out_NC = self._residual(operation, "inp", 0)
        embed(batch.tokens_T[_rows(chunk)], shards, out_NC, self.model.embedding_scale)

    def _forward(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        layer, group, number = operation.task.layer, chunk.group, chunk.number
        attn, saved = BufferKey("attn", layer, group, number), BufferKey("rest", layer, group, number)
        tensors = (
            self._residual(operation, "inp", layer),
            self._kv(operation, BufferKey("kv", layer, group)),
            batch.segments[number],
            *self._cos_sin(layer, chunk, batch),
            self._residual(operation, "inp", layer + 1),
            self._attn(self._bytes(operation, attn), chunk) if attn in operation.buffers else None,
        )
        if self.autograd_layers:
            weights = self._bucket(operation, BufferKey("param", layer))
            return self.autograd_layers[self._kind(layer)].forward(weights, *tensors)
        self.layers[self._kind(layer)].forward(
            self._weights(operation, "forward"),
            *tensors,
            self._saved(self._bytes(operation, saved), chunk) if saved in operation.buffers else None,
        )

    def _kind(self, layer: int) -> str:
        return self.model.attention_kind(layer)

    def _head(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        params, is_trained = self._params(operation, self.buckets.head), self.adapters is None
        trained = self.buckets.head if is_trained else range(0)
        grads = [self._bucket(operation, BufferKey("grad", bucket)) for bucket in trained]
        losses_N = torch.empty(chunk.tokens, device=self.arena.device)
        head_loss(
            self._residual(operation, "inp", self.model.layers), params[-1][1], self.model.norm_eps,
            [tensors[0] for tensors in params], batch.labels_T[_rows(chunk)], 1 / batch.num_labels,
            self._residual(operation, "dstream", -1), [tensors[0] for tensors in grads],
            grads[-1][1] if is_trained else None, self._accumulates(operation, self.buckets.head), losses_N,
            self.plan.loss_tokens, self.model.logit_scale, self.model.logit_softcap,
        )  # fmt: skip
        self.stats.add_losses(losses_N)

    def _backward(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        task, group, number = operation.task, chunk.group, chunk.number
        input_NC, kv = (
            self._residual(operation, "inp", task.layer),
            self._kv(operation, BufferKey("kv", task.layer, group)),
        )
        segments, cos_sin = batch.segments[number], self._cos_sin(task.layer, chunk, batch)
        attn = self._attn(self._saved_or_new(operation, BufferKey("attn", task.layer, group, number)), chunk)
        accumulate = self._accumulates(operation, range(task.layer, task.layer + 1))
        dkv, d_residual_NC = BufferKey("dkv", -1, group), self._residual(operation, "dstream", -1)
        dkv_args = self._kv(operation, dkv), dkv not in task.makes
        if self.autograd_layers:
            params, grads = (self._bucket(operation, BufferKey(kind, task.layer)) for kind in ("param", "grad"))
            return self.autograd_layers[self._kind(task.layer)].backward(
                params, grads, accumulate, input_NC, kv, attn, task.level == ATTENTION, *dkv_args, segments, *cos_sin,
                d_residual_NC,
            )  # fmt: skip
        weights, layer = self._weights(operation, "backward"), self.layers[self._kind(task.layer)]
        saved = self._saved(self._saved_or_new(operation, BufferKey("rest", task.layer, group, number)), chunk)
        if task.level != FULL:
            layer.recompute(
                weights, input_NC, kv, segments, *cos_sin, attn, saved, attn_saved=task.level == ATTENTION
            )  # fmt: skip
        layer.backward(
            weights, self._grads(operation), accumulate, input_NC, kv, attn, saved, *dkv_args, segments,
            *cos_sin, d_residual_NC,
        )  # fmt: skip

    def _embed_backward(self, operation: Operation, chunk: Chunk, batch: GroupBatch) -> None:
        grads = [self._bucket(operation, BufferKey("grad", bucket))[0] for bucket in self.buckets.embedding]
        d_residual_NC = self._residual(operation, "dstream", -1)
        accumulate = self._accumulates(operation, self.buckets.embedding)
        scale = self.model.embedding_scale
        embed_backward(d_residual_NC, batch.tokens_T[_rows(chunk)], grads, accumulate, scale)

    def _update(self, operation: Operation, update: AdamStep) -> None:
        """Update matrices in one pass with the padding between them, vectors, which do not decay, in another."""
        bucket = operation.task.layer
        if self.adapters is not None:
            self.stats.add_gradients([self.adapters.grads])
            return self.adapters.update(update, self.stats.final_factor(), self.seed)
        param, grad, state = (self._bytes(operation, BufferKey(kind, bucket)) for kind in ("param", "grad", "state"))
        if operation.task.first_update:
            state.zero_()
        weights, grads, optimizer = self.dtypes.weights(param), self.dtypes.grads(grad), self.dtypes.state(state)
        factor = self.stats.factor if self.plan.update_at == "forward" else self.stats.provisional_factor()
        for number, (elements, decay) in enumerate(self._decay_ranges(bucket)):
            low = None if optimizer.low is None else optimizer.low[elements]
            adam_update(
                weights[elements], grads[elements], optimizer.m[elements], optimizer.v[elements], low, lr=update.lr,
                beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=decay, step=update.number, factor=factor,
                rounding=self.dtypes.rounding, seed=((self.seed << 24) + update.number << 16) + 2 * bucket + number,
            )  # fmt: skip

    def _decay_ranges(self, bucket: int) -> list[tuple[slice, float]]:
        """Return the elements of a bucket with weight decay, and those without."""
        shapes = self.buckets.tensors(bucket)  # matrices, then vectors
        sizes = [aligned(torch.Size(shape).numel()) for shape in shapes]
        matrices = sum(len(shape) > 1 for shape in shapes)
        border, end = sum(sizes[:matrices]), sum(sizes)
        ranges = [(slice(0, border), WEIGHT_DECAY), (slice(border, end), 0.0)]
        return ranges if end > border else ranges[:1]

    def _accumulates(self, operation: Operation, buckets: range) -> bool:
        """Return whether these gradients already exist; all of them do, or none. Those of adapters always do."""
        return BufferKey("grad", buckets[0]) not in operation.task.makes

    def _bytes(self, operation: Operation, key: BufferKey) -> Tensor:
        return self.arena.buffer(key.kind, operation.buffers[key])

    def _saved_or_new(self, operation: Operation, key: BufferKey) -> Tensor:
        if key in operation.buffers:
            return self._bytes(operation, key)
        return torch.empty(self.arena.sizes[key.kind], dtype=torch.uint8, device=self.arena.device)

    def _bucket(self, operation: Operation, key: BufferKey) -> list[Tensor]:
        """Return the tensors of a bucket's weights, unless frozen in fp8, or gradients."""
        shapes = self.buckets.tensors(key.layer)
        view_key = (key.kind, operation.buffers[key], shapes)
        if view_key not in self._views:
            elements = self.dtypes.weights if key.kind == "param" else self.dtypes.grads
            self._views[view_key] = bucket_tensors(elements(self._bytes(operation, key)), shapes)
        return self._views[view_key]

    def _params(self, operation: Operation, buckets: range) -> list[list[Tensor]]:
        """Return the weights of buckets in the dtype of GEMMs."""
        if self.widened is None:
            return [self._bucket(operation, BufferKey("param", bucket)) for bucket in buckets]
        return self.widened.tensors(
            buckets,
            lambda bucket: self.dtypes.stored(
                self._bytes(operation, BufferKey("param", bucket)), self.buckets.tensors(bucket)
            ),
        )

    def _weights(self, operation: Operation, pass_name: PassName) -> LayerWeights | QuantizedLayerWeights[Any]:
        """Return the weights of a layer, as its linear layers take them."""
        layer = operation.task.layer
        weights = self._layer_weights(self._params(operation, range(layer, layer + 1))[0])
        if self.adapters is not None:
            return self.adapters.adapters.weights(layer, weights)
        return weights if self.fp8 is None else self.fp8.layer(layer, pass_name, weights)

    def _grads(self, operation: Operation) -> LayerWeights:
        """Return what the gradients of a layer are written to."""
        layer = operation.task.layer
        if self.adapters is not None:
            return self.adapters.adapters.grads(layer)
        return self._layer_weights(self._bucket(operation, BufferKey("grad", layer)))

    def _layer_weights(self, tensors: list[Tensor]) -> LayerWeights:
        return LayerWeights(**dict(zip(self.weight_names, tensors, strict=True)))

    def _residual(self, operation: Operation, kind: str, layer: int) -> Tensor:
        chunk = operation.task.chunk
        assert chunk is not None
        key = BufferKey(kind, layer, chunk.group, chunk.number)
        return residual_view(self._bytes(operation, key), self.model, chunk.tokens, self.dtypes.activation)

    def _kv(self, operation: Operation, key: BufferKey) -> KeyValues:
        dtype = torch.float32 if key.kind == "dkv" else self.dtypes.activation
        return kv_view(self._bytes(operation, key), self.model, self.plan.group_tokens, dtype)

    def _attn(self, buffer: Tensor, chunk: Chunk) -> AttentionOutput:
        return attn_view(buffer, self.model, chunk.tokens, self.dtypes.activation)

    def _saved(self, buffer: Tensor, chunk: Chunk) -> SavedActivations:
        return saved_activations_view(buffer, self.model, chunk.tokens, self.dtypes.activation)

    def _cos_sin(self, layer: int, chunk: Chunk, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        return self.rope_rows(batch, _rows(chunk), self._kind(layer))


def _rows(chunk: Chunk) -> slice:
    """Rows of a chunk in its group."""
    return slice(chunk.first, chunk.first + chunk.tokens)
