"""Llama layers as one autograd node each (`llmb/models/llama_layer`): on one GPU with split master weights.

    fuse_layers(model_part)                             # a pass over the plain model
    prepare_fused_layers(model_part, dtype, workload)   # after its weights are initialized
    begin_step(model_part)                              # in fp8: update the scales and quantize the weights

A layer saves its input, q, k, v, the attention output, the residual after it, gate and up, and with save_norm_outputs
the outputs of norms and activation; a recomputed layer saves no q and nothing after the attention, which is the most
expensive part and never recomputed. Weight gradients are written in place, contiguous for merged GEMMs, so autograd
only gets the gradient of the residual.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from llmb.config.spec import Training
from llmb.models.architectures import Network
from llmb.models.llama import LlamaDecoderLayer
from llmb.models.llama_layer.fp8_layer_weights import FORMATS, Fp8LayerWeights, LayerScales
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights, SavedActivations
from llmb.models.llama_layer.linears import PlainLinears
from llmb.ops.attention.segment_attention import chunk_segments
from llmb.ops.gemm.weight_gradient import gradient_dtype
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import DelayedScaling
from llmb.train.split_weights import merged_view


class FusedLayer(LlamaDecoderLayer):
    """Llama layer as one autograd node; its modules only hold the weights."""

    block: LlamaLayer[Any]
    fp8: Fp8LayerWeights | None
    recomputed: bool
    saves_norm_outputs: bool  # and that of the activation

    @property
    def merged_linears(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """Linear layers whose weights are contiguous in memory."""
        attention, mlp = self.attention, self.mlp
        return (attention.q, attention.k, attention.v), (mlp.gate, mlp.up)

    @property
    def matrices(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """Linear layers of each GEMM, in the order of LayerWeights."""
        projections, gates = self.merged_linears
        return projections, (self.attention.o,), gates, (self.mlp.down,)

    @property
    def norms(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.attention_norm.weight, self.mlp_norm.weight

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        return _FusedLayerFunction.apply(x_BTC, cos_TD, sin_TD, self)

    def weights(self) -> LayerWeights:
        """Return views of the current weights."""
        matrices = [merged_view([linear.weight.detach() for linear in linears]) for linears in self.matrices]
        return LayerWeights(*matrices, *(norm.detach() for norm in self.norms))

    def gradients(self) -> tuple[LayerWeights, bool]:
        """Return the gradients, allocated if necessary, and whether there are values to accumulate to."""
        accumulate = self.attention_norm.weight.grad is not None
        if not accumulate:
            for linears in self.matrices:
                _allocate_gradients([linear.weight for linear in linears])
            for norm in self.norms:
                norm.grad = torch.empty_like(norm)
        matrices = [merged_view([_gradient(linear.weight) for linear in linears]) for linears in self.matrices]
        return LayerWeights(*matrices, *map(_gradient, self.norms)), accumulate


class _FusedLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, layer: FusedLayer) -> Tensor:
        model, (sequences, tokens, _) = layer.block.model, x_BTC.shape
        ctx.segments = chunk_segments(range(0, sequences * tokens, tokens), 0, sequences * tokens)
        ctx.layer, inp_NC = layer, x_BTC.flatten(0, 1)
        cos_ND, sin_ND = (_repeat_table(table, sequences) for table in (cos_TD, sin_TD))

        kv = KeyValues(*(inp_NC.new_empty(len(inp_NC), model.kv_heads * model.head_dim) for _ in range(2)))
        saved, out_NC = None if layer.recomputed else _empty_saved(layer, inp_NC), torch.empty_like(inp_NC)
        ctx.inputs = {} if layer.saves_norm_outputs and not layer.recomputed else None
        weights = layer.fp8 or layer.weights()
        attn = layer.block.forward(
            weights, inp_NC, kv, ctx.segments, cos_ND, sin_ND, out_NC, saved=saved, inputs=ctx.inputs, return_attn=True
        )
        assert attn is not None
        ctx.save_for_backward(inp_NC, *kv, *attn, cos_ND, sin_ND, *(saved or ()))
        return out_NC.view_as(x_BTC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor, None, None, None]:
        inp_NC, k, v, out, lse, cos_ND, sin_ND, *tensors = ctx.saved_tensors
        layer: FusedLayer = ctx.layer
        weights, (grads, accumulate) = layer.fp8 or layer.weights(), layer.gradients()
        kv, attn, dx_NC = KeyValues(k, v), AttentionOutput(out, lse), torch.empty_like(inp_NC)
        saved = SavedActivations(*tensors) if tensors else _empty_saved(layer, inp_NC)
        if not tensors:
            layer.block.recompute(weights, inp_NC, kv, ctx.segments, cos_ND, sin_ND, attn, saved, attn_saved=True)
        layer.block.backward(
            weights, grads, accumulate, inp_NC, kv, attn, saved, None, False, ctx.segments, cos_ND, sin_ND,
            dy_BTC.flatten(0, 1).contiguous(), dx_NC, ctx.inputs,
        )  # fmt: skip
        return dx_NC.view_as(dy_BTC), None, None, None


_repeated_tables: Any = WeakIdKeyDictionary()  # RoPE table -> the table repeated for all sequences


def _repeat_table(table_TD: Tensor, sequences: int) -> Tensor:
    """Return a RoPE table for all sequences; computed once, as all layers get the same table."""
    if sequences == 1:
        return table_TD
    table_ND = _repeated_tables.get(table_TD)
    if table_ND is None or len(table_ND) != sequences * len(table_TD):
        table_ND = _repeated_tables[table_TD] = table_TD.repeat(sequences, 1)
    return table_ND


def _empty_saved(layer: FusedLayer, inp_NC: Tensor) -> SavedActivations:
    model = layer.block.model
    q_NA = inp_NC.new_empty(len(inp_NC), model.heads * model.head_dim)
    gate_up_NF = inp_NC.new_empty(len(inp_NC), 2 * model.ffn)
    return SavedActivations(q_NA, torch.empty_like(inp_NC), gate_up_NF)


def fuse_layers(model_part: Network) -> None:
    """Turn every layer into a FusedLayer."""
    for layer in model_part.layers:
        assert type(layer) is LlamaDecoderLayer
        layer.__class__ = FusedLayer
    for layer in fused_layers(model_part):
        layer.recomputed = False


def prepare_fused_layers(model_part: Network, dtype: str, workload: Training) -> None:
    """Set up the computation of fused layers, whose weights are split and contiguous."""
    model, layers = model_part.model, fused_layers(model_part)
    if not layers:
        return
    linears = PlainLinears if dtype == "bf16" else partial(Fp8Linears, fp8_fast_accum=workload.fp8_fast_accum)
    block: LlamaLayer[Any] = LlamaLayer(model, linears)
    scales: LayerScales | None = None
    if dtype == "fp8":
        formats = {(index, name): dtype for index in range(len(layers)) for name, dtype in FORMATS.items()}
        scales = DelayedScaling(formats, layers[0].norms[0].device)
    for index, layer in enumerate(layers):
        layer.block, layer.fp8, layer.saves_norm_outputs = block, None, workload.save_norm_outputs
        if scales is not None:
            weights = layer.weights()
            rows = [torch.empty_like(matrix, dtype=E4M3) for matrix in weights[:4]]
            columns = [torch.empty_like(matrix.T, dtype=E4M3, memory_format=torch.contiguous_format) for matrix in rows]
            layer.fp8 = Fp8LayerWeights(index, weights, scales, rows, columns)


def begin_step(model_part: Network) -> None:
    """Update fp8 scales and quantize the weights; never in a CUDA graph, which would repeat it per micro-batch."""
    layers = [layer.fp8 for layer in fused_layers(model_part) if layer.fp8 is not None]
    if layers:
        layers[0].scales.update()
    for layer in layers:
        layer.quantize()


def fp8_scales(model_parts: Iterable[nn.Module]) -> LayerScales | None:
    """Return the delayed scaling of all fused layers; None unless they compute in fp8."""
    layers = (layer for model_part in model_parts for layer in fused_layers(model_part))
    return next((layer.fp8.scales for layer in layers if layer.fp8 is not None), None)


def fused_layers(model_part: nn.Module) -> list[FusedLayer]:
    """Return the fused layers, first to last."""
    return [layer for layer in model_part.modules() if isinstance(layer, FusedLayer)]


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _allocate_gradients(weights: list[Tensor]) -> None:
    """Allocate the gradients contiguously, as the weights are."""
    rows = [len(weight) for weight in weights]
    memory = torch.empty(sum(rows), weights[0].shape[1], dtype=gradient_dtype(weights[0]), device=weights[0].device)
    for weight, gradient in zip(weights, memory.split(rows), strict=True):
        weight.grad = gradient
