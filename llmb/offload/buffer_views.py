"""Tensors inside buffers: views laid out as `llmb/perfmodel/offload/buffers.py` counts them, and their dtypes.

    weights = layer_weights_view(elements, model)               # also of a gradient, or of a moment: any dtype
    attn = attn_view(buffer, model, tokens, torch.bfloat16)     # buffer: bytes
    low, m, v = offload_dtypes(plan).state(arena.buffer("state", 0))

Weights begin at multiples of 256 elements, so that a weight, its gradient and its state have the same offset in their
buffers; activations begin at multiples of 256 bytes. Shapes: N tokens of a chunk, T tokens of a context, C hidden
width, A width of all heads, W width of all KV heads, H heads, F width of the MLP, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned, layer_weight_shapes
from llmb.config.offload_plan import Plan
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights, SavedActivations
from llmb.offload.lora.frozen_weights import StoredTensor, fp8_bucket_tensors
from llmb.ops.optim.adam import Rounding

Shape = tuple[int, ...]


def layer_weights_view(elements: Tensor, model: Model) -> LayerWeights:
    """Return the weights of a layer in a flat buffer."""
    shapes = layer_weight_shapes(model)
    return LayerWeights(**dict(zip(shapes, bucket_tensors(elements, [*shapes.values()]), strict=True)))


def bucket_tensors(elements: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return consecutive tensors of a flat buffer."""
    tensors, first = [], 0
    for shape in shapes:
        tensors.append(elements[first : first + prod(shape)].view(shape))
        first += aligned(prod(shape))
    return tensors


def kv_view(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> KeyValues:
    """Return keys and values, or their gradients, in a buffer of bytes."""
    shape = (tokens, model.kv_heads * model.head_dim)
    return KeyValues(*_views(buffer, (shape, dtype), (shape, dtype)))


def attn_view(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> AttentionOutput:
    """Return a chunk's attention output in a buffer of bytes."""
    out = ((tokens, model.heads * model.head_dim), dtype)
    return AttentionOutput(*_views(buffer, out, ((model.heads, tokens), torch.float32)))


def saved_activations_view(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> SavedActivations:
    """Return a chunk's queries, residual, gate and up in a buffer of bytes, and what norms of keys and of both blocks
    take where there are any."""
    widths = {"q_NA": model.heads * model.head_dim, "residual_SC": model.hidden, "gate_up_N2F": 2 * model.ffn}
    if model.qk_norm is not None:
        widths["k_NW"] = model.kv_heads * model.head_dim
    if model.post_norms:
        widths |= {"attn_SC": model.hidden, "mlp_SC": model.hidden}
    views = _views(buffer, *(((tokens, width), dtype) for width in widths.values()))
    return SavedActivations(**dict(zip(widths, views, strict=True)))


def residual_view(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return a chunk's residual, or its gradient, in a buffer of bytes."""
    return _views(buffer, ((tokens, model.hidden), dtype))[0]


def _views(buffer: Tensor, *specs: tuple[Shape, torch.dtype]) -> list[Tensor]:
    tensors, first = [], 0
    for shape, dtype in specs:
        size = prod(shape) * dtype.itemsize
        tensors.append(buffer[first : first + size].view(dtype).view(shape))
        first += aligned(size)
    return tensors


class OptimizerState(NamedTuple):
    """Optimizer state of each weight, in the order in which it lies in a buffer."""

    low: Tensor | None  # low 16 bits of the fp32 master weight, whose high half is the bf16 weight
    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class OffloadDtypes:
    """Dtypes of a run; the sizes in `llmb/perfmodel/offload/buffers.py` follow from the same choices."""

    activation: torch.dtype  # and of weights
    grad: torch.dtype
    moment: torch.dtype
    has_low: bool
    rounding: Rounding
    has_fp8_weights: bool = False  # frozen ones

    def weights(self, buffer: Tensor) -> Tensor:
        """Return the elements of a bucket's weights, given its bytes."""
        return buffer.view(self.activation)

    def stored(self, buffer: Tensor, shapes: Sequence[Shape]) -> list[StoredTensor]:
        """Return the tensors of a bucket's weights as they are stored, given its bytes."""
        if self.has_fp8_weights:
            return fp8_bucket_tensors(buffer, shapes, self.activation)
        return [*bucket_tensors(self.weights(buffer), shapes)]

    def grads(self, buffer: Tensor) -> Tensor:
        """Return the elements of its gradients."""
        return buffer.view(self.grad)

    def state(self, buffer: Tensor) -> OptimizerState:
        """Return the elements of its optimizer state."""
        low = torch.int16.itemsize if self.has_low else 0
        numel = buffer.numel() // (low + 2 * self.moment.itemsize)
        low_bytes, *moments = buffer.split((low * numel, *[self.moment.itemsize * numel] * 2))
        m, v = (moment.view(self.moment) for moment in moments)
        return OptimizerState(low_bytes.view(torch.int16) if self.has_low else None, m, v)


def offload_dtypes(plan: Plan) -> OffloadDtypes:
    """Return the dtypes of a plan; in fp32 nothing is rounded, whatever the update."""
    fp8 = plan.widens_weights
    if plan.dtype == "fp32":
        return OffloadDtypes(torch.float32, torch.float32, torch.float32, False, "nearest", fp8)
    rounding: Rounding = "stochastic" if plan.update == "stochastic" else "nearest"
    has_master = plan.update == "master"
    moment = torch.float32 if has_master else torch.bfloat16
    return OffloadDtypes(torch.bfloat16, moment, moment, has_master, rounding, fp8)
