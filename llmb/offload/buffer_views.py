"""The tensors inside pieces: views into flat buffers, laid out as `llmb/perfmodel/offload/buffers.py` counts them.

    weights = block_weights(numbers, model)                 # also of a gradient, or of a moment: any format
    attn = attn_of(buffer, model, tokens, torch.bfloat16)   # buffer: bytes

Tensors of weights begin at multiples of 256 numbers, so that a weight, its gradient and its state lie at the same
places of their buffers; those of activations begin at multiples of 256 bytes. Shapes: N tokens of a chunk, T tokens of
a context, C hidden width, A width of all heads, W of all heads of keys, H heads, F width of the MLP, V vocabulary.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import aligned, layer_weight_shapes
from llmb.config.spec import Model
from llmb.models.llama_layer.layer_tensors import Attn, BlockWeights, KeyValues, Rest

Shape = tuple[int, ...]


def block_weights(numbers: Tensor, model: Model) -> BlockWeights:
    """The weights of a layer in a buffer of numbers."""
    return BlockWeights(*unit_tensors(numbers, layer_weight_shapes(model)))


def unit_tensors(numbers: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Tensors behind one another in a buffer of numbers."""
    found, first = [], 0
    for shape in shapes:
        found.append(numbers[first : first + prod(shape)].view(shape))
        first += aligned(prod(shape))
    return found


def kv_of(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> KeyValues:
    """Keys and values in a buffer of bytes; their slopes with another format."""
    shape = (tokens, model.kv_heads * model.head_dim)
    return KeyValues(*_in_bytes(buffer, (shape, dtype), (shape, dtype)))


def attn_of(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> Attn:
    """A chunk's attention in a buffer of bytes."""
    out = ((tokens, model.heads * model.head_dim), dtype)
    return Attn(*_in_bytes(buffer, out, ((model.heads, tokens), torch.float32)))


def rest_of(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> Rest:
    """A chunk's queries, stream and MLP in a buffer of bytes."""
    widths = (model.heads * model.head_dim, model.hidden, 2 * model.ffn)
    return Rest(*_in_bytes(buffer, *(((tokens, width), dtype) for width in widths)))


def stream_of(buffer: Tensor, model: Model, tokens: int, dtype: torch.dtype) -> Tensor:
    """A chunk's stream, or its slope, in a buffer of bytes."""
    return _in_bytes(buffer, ((tokens, model.hidden), dtype))[0]


def _in_bytes(buffer: Tensor, *wanted: tuple[Shape, torch.dtype]) -> list[Tensor]:
    found, first = [], 0
    for shape, dtype in wanted:
        size = prod(shape) * dtype.itemsize
        found.append(buffer[first : first + size].view(dtype).view(shape))
        first += aligned(size)
    return found
