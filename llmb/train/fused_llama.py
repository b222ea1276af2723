"""Layers of a Llama as one step of autograd each, computed by hand (`llmb/models/llama_layer`): on one GPU with halved weights.

    fuse_layers(part)               # a pass over the plain model
    make_ready(part, dtype, work)                   # once its weights have values
    begin_step(part)                # in fp8: weights in 8 bits anew, and the scales that the last steps call for

Of a layer are kept its input, queries, keys and values, the attention, the stream behind it, gate and up, and if that
is asked for what norms and the activation gave; of one that is recomputed no queries and nothing behind the attention,
which is the dearest and never computed again. Gradients are written where they are kept, side by side as one product
makes them, so autograd is given the stream's slope only.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from llmb.config.spec import Training
from llmb.models.architectures import Network
from llmb.models.llama import Layer
from llmb.models.llama_layer.fp8_layer_weights import FORMATS, Fp8Layer, LayerScales
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer import Block
from llmb.models.llama_layer.layer_tensors import Attn, BlockWeights, KeyValues, Rest
from llmb.models.llama_layer.linears import PlainLinears
from llmb.ops.attention.segment_attention import spans_of
from llmb.ops.gemm.weight_gradient import gradient_dtype
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import Scales
from llmb.train.split_weights import joint


class FusedLayer(Layer):
    """The same layer in one step; its modules only hold the weights."""

    block: Block[Any]
    fp8: Fp8Layer | None
    recomputed: bool
    keeps_inputs: bool  # of its products, what norms and the activation gave

    @property
    def neighbours(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """Linear layers whose weights lie side by side."""
        attention, mlp = self.attention, self.mlp
        return (attention.q, attention.k, attention.v), (mlp.gate, mlp.up)

    @property
    def matrices(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """In the order of BlockWeights."""
        projections, gates = self.neighbours
        return projections, (self.attention.o,), gates, (self.mlp.down,)

    @property
    def norms(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.attention_norm.weight, self.mlp_norm.weight

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        return _Step.apply(x_BTC, cos_TD, sin_TD, self)

    def weights(self) -> BlockWeights:
        """As they are now."""
        found = [joint([linear.weight.detach() for linear in linears]) for linears in self.matrices]
        return BlockWeights(*found, *(norm.detach() for norm in self.norms))

    def gradients(self) -> tuple[BlockWeights, bool]:
        """Memory for this layer's, and whether they begin here."""
        fresh = self.attention_norm.weight.grad is None
        if fresh:
            for linears in self.matrices:
                _make_gradients([linear.weight for linear in linears])
            for norm in self.norms:
                norm.grad = torch.empty_like(norm)
        found = [joint([_gradient(linear.weight) for linear in linears]) for linears in self.matrices]
        return BlockWeights(*found, *map(_gradient, self.norms)), fresh


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, layer: FusedLayer) -> Tensor:
        model, (sequences, tokens, _) = layer.block.model, x_BTC.shape
        ctx.spans = spans_of(range(0, sequences * tokens, tokens), 0, sequences * tokens)
        ctx.layer, inp_NC = layer, x_BTC.flatten(0, 1)
        cos_ND, sin_ND = (_for_all(table, sequences) for table in (cos_TD, sin_TD))

        kv = KeyValues(*(inp_NC.new_empty(len(inp_NC), model.kv_heads * model.head_dim) for _ in range(2)))
        rest, out_NC = None if layer.recomputed else _room_for_rest(layer, inp_NC), torch.empty_like(inp_NC)
        ctx.inputs = {} if layer.keeps_inputs and not layer.recomputed else None
        weights = layer.fp8 or layer.weights()
        attn = layer.block.forward(
            weights, inp_NC, kv, ctx.spans, cos_ND, sin_ND, out_NC, rest=rest, inputs=ctx.inputs, gives_attn=True
        )
        assert attn is not None
        ctx.save_for_backward(inp_NC, *kv, *attn, cos_ND, sin_ND, *(rest or ()))
        return out_NC.view_as(x_BTC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor, None, None, None]:
        inp_NC, k, v, out, lse, cos_ND, sin_ND, *kept = ctx.saved_tensors
        layer: FusedLayer = ctx.layer
        weights, (grads, fresh) = layer.fp8 or layer.weights(), layer.gradients()
        kv, attn, dx_NC = KeyValues(k, v), Attn(out, lse), torch.empty_like(inp_NC)
        rest = Rest(*kept) if kept else _room_for_rest(layer, inp_NC)
        if not kept:
            layer.block.recompute(weights, inp_NC, kv, ctx.spans, cos_ND, sin_ND, attn, rest, attn_saved=True)
        layer.block.backward(
            weights, grads, fresh, inp_NC, kv, attn, rest, None, True, ctx.spans, cos_ND, sin_ND,
            dy_BTC.flatten(0, 1).contiguous(), dx_NC, ctx.inputs,
        )  # fmt: skip
        return dx_NC.view_as(dy_BTC), None, None, None


_repeated: Any = WeakIdKeyDictionary()  # tables that are still alive -> themselves for all sequences


def _for_all(table_TD: Tensor, sequences: int) -> Tensor:
    """Made once for all layers, which are given the same table."""
    if sequences == 1:
        return table_TD
    found = _repeated.get(table_TD)
    if found is None or len(found) != sequences * len(table_TD):
        found = _repeated[table_TD] = table_TD.repeat(sequences, 1)
    return found


def _room_for_heads(layer: FusedLayer, inp_NC: Tensor) -> Tensor:
    return inp_NC.new_empty(len(inp_NC), layer.block.model.heads * layer.block.model.head_dim)


def _room_for_rest(layer: FusedLayer, inp_NC: Tensor) -> Rest:
    both = inp_NC.new_empty(len(inp_NC), 2 * layer.block.model.ffn)
    return Rest(_room_for_heads(layer, inp_NC), torch.empty_like(inp_NC), both)


def fuse_layers(part: Network) -> None:
    """Every layer becomes one that is computed in one step."""
    for layer in part.layers:
        assert type(layer) is Layer
        layer.__class__ = FusedLayer
    for layer in fused_layers(part):
        layer.recomputed = False


def make_ready(part: Network, dtype: str, work: Training) -> None:
    """Give the layers what computes them; their weights are halved, and lie side by side."""
    model, layers = part.model, fused_layers(part)
    if not layers:
        return
    block: Block[Any] = Block(model, PlainLinears if dtype == "bf16" else partial(Fp8Linears, fast_sums=work.fast_sums))
    scales: LayerScales | None = None
    if dtype == "fp8":
        names = {(number, name): form for number in range(len(layers)) for name, form in FORMATS.items()}
        scales = Scales(names, layers[0].norms[0].device)
    for number, layer in enumerate(layers):
        layer.block, layer.fp8, layer.keeps_inputs = block, None, work.keep_inputs
        if scales is not None:
            weights = layer.weights()
            rows = [torch.empty_like(matrix, dtype=E4M3) for matrix in weights[:4]]
            columns = [torch.empty_like(matrix.T, dtype=E4M3, memory_format=torch.contiguous_format) for matrix in rows]
            layer.fp8 = Fp8Layer(number, weights, scales, rows, columns)


def begin_step(part: Network) -> None:
    """What has become of the weights since the last step; not inside a CUDA graph, which would repeat it."""
    layers = [layer.fp8 for layer in fused_layers(part) if layer.fp8 is not None]
    if layers:
        layers[0].scales.roll()
    for layer in layers:
        layer.renew()


def scales_of(parts: Iterable[nn.Module]) -> LayerScales | None:
    """All that 8-bit tensors of the fused layers are scaled by; none in other formats."""
    layers = (layer for part in parts for layer in fused_layers(part))
    return next((layer.fp8.scales for layer in layers if layer.fp8 is not None), None)


def fused_layers(part: nn.Module) -> list[FusedLayer]:
    """Those that are computed by hand, first to last."""
    return [layer for layer in part.modules() if isinstance(layer, FusedLayer)]


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _make_gradients(weights: list[Tensor]) -> None:
    """Side by side, as the weights are."""
    rows = [len(weight) for weight in weights]
    memory = torch.empty(sum(rows), weights[0].shape[1], dtype=gradient_dtype(weights[0]), device=weights[0].device)
    for weight, gradient in zip(weights, memory.split(rows), strict=True):
        weight.grad = gradient
