"""Llama layers as one autograd node each (`llmb/models/llama_layer`): on one rank or many, in any precision.

    use_explicit_layers(model_part, dtype, workload, tp, cp)    # a pass over the plain model
    init_fp8_scaling(model_part, device, reductions)            # in fp8
    begin_step(model_part)                                      # updates the scales

A layer saves its input, q, k, v, the attention output, the residual after it, gate and up, what post-norms take, and
with save_norm_outputs the outputs of norms and activation; a recomputed layer saves no q and nothing after the
attention, which is the most expensive part and never recomputed. Where q, k and v are all saved they are columns of one
matrix, written by one GEMM. Weight gradients are written in place, contiguous for merged GEMMs, so autograd only gets
the gradient of the residual.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from llmb.config.spec import Training
from llmb.models.architectures import Network
from llmb.models.blocks import GatedMlp, RMSNorm
from llmb.models.llama import LlamaDecoderLayer
from llmb.models.llama_layer.fp8_layer_weights import QuantizedLayerWeights
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.layer_recipes import DEFAULT, LAYER_RECIPES, LayerRecipe
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights, SavedActivations
from llmb.models.llama_layer.linears import PlainLinears
from llmb.ops.attention.segment_attention import chunk_segments
from llmb.ops.gemm.weight_gradient import existing_gradient
from llmb.ops.tensor_layout import merge_columns
from llmb.perfmodel.params import unaligned_fp8_widths
from llmb.train.module_class import use_class
from llmb.train.parallel.bucket import merged_view
from llmb.train.parallel.context_parallel import ContextParallel
from llmb.train.parallel.sequence_parallel import SequenceParallel


class ExplicitLayer(LlamaDecoderLayer):
    """Llama layer as one autograd node; its modules only hold the weights, whole or sharded over tp.

    Weights are read in each pass, so their memory may change in between.
    """

    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMlp
    index: int  # in the whole model
    block: LlamaLayer[Any]
    fp8: LayerRecipe | None
    saves_norm_outputs: bool  # and that of the activation
    recomputed = False
    scales: Any = None  # as the recipe takes them
    weights_stay = True  # between passes of a step; see QuantizedLayerWeights
    fp8_weights: QuantizedLayerWeights[Any] | None = None  # of weights that stay
    is_quantized = False  # in this step

    @property
    def matrices(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """Linear layers of each GEMM, in the order of LayerWeights."""
        attention, mlp = self.attention, self.mlp
        return (attention.q, attention.k, attention.v), (attention.o,), (mlp.gate, mlp.up), (mlp.down,)

    @property
    def vectors(self) -> dict[str, tuple[Tensor, ...]]:
        """Norms and biases by their names in LayerWeights; a bias of queries, keys and values has three."""
        attention = self.attention
        vectors: dict[str, tuple[Tensor, ...]] = {
            "norm1_C": (self.attention_norm.weight,), "norm2_C": (self.mlp_norm.weight,)
        }  # fmt: skip
        biases = attention.q_bias, attention.k_bias, attention.v_bias
        if attention.q_bias is not None:
            vectors["bqkv_X"] = tuple(bias for bias in biases if bias is not None)
        if attention.qk_norm is not None:
            vectors |= {"q_norm_D": (attention.q_norm.weight,), "k_norm_D": (attention.k_norm.weight,)}
        post_norms = self.attention_post_norm, self.mlp_post_norm
        for i, norm in enumerate(norm for norm in post_norms if isinstance(norm, RMSNorm)):
            vectors[f"post_norm{i + 1}_C"] = (norm.weight,)
        return vectors

    def forward(self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None) -> Tensor:
        if cos_TD is None:  # a layer without RoPE
            tokens = x_BTC.shape[1] * (1 if self.block.tp is None else self.block.tp.ranks)
            cos_TD = sin_TD = x_BTC.new_empty(tokens, 0)
        return _ExplicitLayerFunction.apply(x_BTC, cos_TD, sin_TD, self)

    def weights(self) -> LayerWeights:
        """Return views of the current matrices and norms, and a copy of the current bias."""
        matrices = [merged_view([linear.weight.detach() for linear in linears]) for linears in self.matrices]
        return LayerWeights(*matrices, **{name: _merge(vectors) for name, vectors in self.vectors.items()})

    def pass_weights(self) -> LayerWeights | QuantizedLayerWeights[Any]:
        """Return the weights of one pass, as the block's linears take them."""
        if self.fp8 is None:
            return self.weights()
        if not self.weights_stay:
            return self._new_fp8_weights()
        self.quantize()
        assert self.fp8_weights is not None
        if self.attention.q_bias is not None:
            self.fp8_weights.weights = self.weights()  # whose bias, no view, is that of now
        return self.fp8_weights

    def quantize(self) -> None:
        """Quantize weights that stay in memory until the next step, once."""
        if self.is_quantized:
            return
        self.is_quantized = True
        if self.fp8_weights is None:
            assert self.fp8 is not None
            weights = self.weights()
            shapes = (matrix.shape for matrix in weights.matrices)
            buffers = self.fp8.weights.empty_buffers(shapes, weights.norm1_C.device, self.scales)
            self.fp8_weights = self._new_fp8_weights(buffers)
        self.fp8_weights.quantize()

    def _new_fp8_weights(self, buffers: Any = None) -> QuantizedLayerWeights[Any]:
        assert self.fp8 is not None
        assert self.scales is not None, "init_fp8_scaling sets scales"
        return self.fp8.weights(self.index, self.weights(), self.scales, buffers)

    def gradients(self) -> tuple[LayerWeights, bool]:
        """Return the gradients, allocated if necessary, and whether there are values to accumulate to.

        Those of vectors may be new where they exist: they are replicated, and accumulate where those of matrices are
        reduced. Then `add_vector_gradients` adds them, in a pass of its own.
        """
        accumulate = self.mlp.down.weight.grad is not None
        if not accumulate:
            for weight in (linear.weight for linears in self.matrices for linear in linears):
                weight.grad = weight.main_grad  # type: ignore[attr-defined]
        matrices = [merged_view([existing_gradient(linear.weight) for linear in linears]) for linears in self.matrices]
        vectors = {}
        for name, parameters in self.vectors.items():
            if accumulate and len(parameters) == 1 and parameters[0].grad is not None:
                vectors[name] = parameters[0].grad
                continue
            allocate = parameters[0].new_zeros if accumulate else parameters[0].new_empty
            vectors[name] = allocate(sum(parameter.numel() for parameter in parameters))
        return LayerWeights(*matrices, **vectors), accumulate

    def add_vector_gradients(self, grads: LayerWeights) -> None:
        """Accumulate the gradients of norms and biases, unless the layer did so in place."""
        for parameters, grad in zip(self.vectors.values(), grads.vectors, strict=True):
            if grad is parameters[0].grad:
                continue
            grads_of = grad.split([parameter.numel() for parameter in parameters])
            for parameter, own_grad in zip(parameters, grads_of, strict=True):
                parameter.grad = own_grad if parameter.grad is None else parameter.grad.add_(own_grad)

    def empty_activations(self, input_SC: Tensor, tokens: int) -> tuple[KeyValues, SavedActivations | None]:
        """Allocate keys and values, and the saved activations unless the layer is recomputed.

        Queries, keys and values are side by side where the backward pass takes all three: with norms of heads it takes
        other keys, with context parallelism keys and values of all ranks.
        """
        block = self.block
        if self.recomputed or block.cp is not None or block.model.qk_norm is not None:
            kv = KeyValues(*(input_SC.new_empty(tokens, block.kv_width) for _ in range(2)))
            return kv, None if self.recomputed else self.empty_saved(input_SC, tokens)
        qkv_NX = input_SC.new_empty(tokens, sum(block.qkv_widths))
        q_NA, k_NW, v_NW = qkv_NX.split(block.qkv_widths, dim=1)
        return KeyValues(k_NW, v_NW), self.empty_saved(input_SC, tokens, q_NA)

    def empty_saved(self, input_SC: Tensor, tokens: int, q_NA: Tensor | None = None) -> SavedActivations:
        """Allocate the saved activations, of so many tokens inside attention and MLP; queries unless given."""
        model = self.block.model
        q_NA = input_SC.new_empty(tokens, self.block.width) if q_NA is None else q_NA
        k_NW = None if model.qk_norm is None else input_SC.new_empty(tokens, model.kv_heads * model.head_dim)
        blocks = [torch.empty_like(input_SC) if model.post_norms else None for _ in range(2)]
        gate_up_N2F = input_SC.new_empty(tokens, 2 * model.ffn)
        return SavedActivations(q_NA, torch.empty_like(input_SC), gate_up_N2F, k_NW, *blocks)


class _ExplicitLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, layer: ExplicitLayer) -> Tensor:
        block, sequences, tokens = layer.block, len(x_BTC), len(cos_TD)
        assert block.tp is None or block.tp.sequences == sequences, "else gathered tokens would be in another order"
        ctx.segments = chunk_segments(range(0, sequences * tokens, tokens), 0, sequences * tokens)
        ctx.layer, input_SC = layer, x_BTC.flatten(0, 1)
        cos_ND, sin_ND = (_repeat_table(table, sequences) for table in (cos_TD, sin_TD))

        kv, saved = layer.empty_activations(input_SC, len(cos_ND))
        out_BTC = torch.empty_like(x_BTC, memory_format=torch.contiguous_format)
        ctx.inputs = {} if layer.saves_norm_outputs and not layer.recomputed else None
        attn_kv = block.forward(
            layer.pass_weights(), input_SC, kv, ctx.segments, cos_ND, sin_ND, out_BTC.flatten(0, 1), saved=saved,
            inputs=ctx.inputs, return_attn=True,
        )  # fmt: skip
        assert attn_kv is not None
        attn, kv = attn_kv
        qkv = merge_columns(kv if saved is None else (saved.q_NA, *kv))
        ctx.qkv_tensors = len(qkv)
        ctx.save_for_backward(input_SC, *attn, cos_ND, sin_ND, *qkv, *(saved or ())[1:])
        return out_BTC  # not a view, which would hold its base after the memory of a sent output is freed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor, None, None, None]:
        input_SC, out, lse, cos_ND, sin_ND, *tensors = ctx.saved_tensors
        layer: ExplicitLayer = ctx.layer
        qkv, others = tensors[: ctx.qkv_tensors], tensors[ctx.qkv_tensors :]
        *q, k, v = qkv[0].split(layer.block.qkv_widths, dim=1) if len(qkv) == 1 else qkv
        weights, (grads, accumulate) = layer.pass_weights(), layer.gradients()
        kv, attn, dx_SC = KeyValues(k, v), AttentionOutput(out, lse), torch.empty_like(input_SC)
        saved = SavedActivations(*q, *others) if q else layer.empty_saved(input_SC, len(cos_ND))
        if not q:
            layer.block.recompute(weights, input_SC, kv, ctx.segments, cos_ND, sin_ND, attn, saved, attn_saved=True)
        layer.block.backward(
            weights, grads, accumulate, input_SC, kv, attn, saved, None, False, ctx.segments, cos_ND, sin_ND,
            dy_BTC.flatten(0, 1).contiguous(), dx_SC, ctx.inputs,
        )  # fmt: skip
        layer.add_vector_gradients(grads)
        return dx_SC.view_as(dy_BTC), None, None, None


def _merge(vectors: tuple[Tensor, ...]) -> Tensor:
    """Return one vector of all: itself, or a copy of several."""
    first, *others = (vector.detach() for vector in vectors)
    return torch.cat((first, *others)) if others else first


_repeated_tables: Any = WeakIdKeyDictionary()  # RoPE table -> the table repeated for all sequences


def _repeat_table(table_TD: Tensor, sequences: int) -> Tensor:
    """Return a RoPE table for all sequences; computed once, as all layers get the same table."""
    if sequences == 1:
        return table_TD
    table_ND = _repeated_tables.get(table_TD)
    if table_ND is None or len(table_ND) != sequences * len(table_TD):
        table_ND = _repeated_tables[table_TD] = table_TD.repeat(sequences, 1)
    return table_ND


def use_explicit_layers(
    model_part: Network,
    dtype: str,
    workload: Training,
    tp: SequenceParallel | None = None,
    cp: ContextParallel | None = None,
    recipe: str | None = None,
) -> None:
    """Let every layer compute with an ExplicitLayer, in bf16 where this rank's widths are not supported by fp8.

    `recipe` names that of an fp8 run.
    """
    model, ranks = model_part.model, 1 if tp is None else tp.ranks
    shard = replace(
        model, heads=model.heads // ranks, kv_heads=model.kv_heads // ranks, ffn=model.ffn // ranks,
        embedding_scale=1.0, logit_scale=1.0, logit_softcap=None,  # which are outside of layers
    )  # fmt: skip
    fp8 = LAYER_RECIPES[recipe or DEFAULT] if dtype == "fp8" and not unaligned_fp8_widths(shard) else None
    linears: Any = PlainLinears if fp8 is None else partial(fp8.linears, fp8_fast_accum=workload.fp8_fast_accum)
    blocks: dict[str, LlamaLayer[Any]] = {
        kind: LlamaLayer(shard, linears, tp=tp, cp=cp, kind=kind) for kind in set(model.attention_pattern)
    }
    for name, module in model_part.layers.named_children():
        block = blocks[model.attention_kind(int(name))]
        settings = {"index": int(name), "block": block, "fp8": fp8, "saves_norm_outputs": workload.save_norm_outputs}
        use_class(module, ExplicitLayer, **settings)


def init_fp8_scaling(model_part: Network, device: torch.device, reductions: Any = None) -> None:
    """Give fp8 layers their scales; `reductions` are those of the recipe, over ranks that share tensors."""
    layers = [layer for layer in explicit_layers(model_part) if layer.fp8 is not None]
    if layers and layers[0].fp8 is not None:
        indices = [layer.index for layer in layers]
        model_part.fp8_scaling = layers[0].fp8.new_scaling(indices, device, reductions)
    for layer in layers:
        layer.scales = model_part.fp8_scaling


def begin_step(model_part: Network) -> None:
    """Update fp8 scales; weights that stay are quantized when they are first used."""
    if model_part.fp8_scaling is not None:
        model_part.fp8_scaling.update()
    for layer in explicit_layers(model_part):
        layer.is_quantized = False


def quantize_weights(model_part: Network) -> None:
    """Quantize weights that stay: before a CUDA graph, which would repeat it for each micro-batch."""
    for layer in explicit_layers(model_part):
        if layer.fp8 is not None and layer.weights_stay:
            layer.quantize()


def explicit_layers(model_part: nn.Module) -> list[ExplicitLayer]:
    """Return the explicit layers, first to last."""
    return [module for module in model_part.modules() if isinstance(module, ExplicitLayer)]
