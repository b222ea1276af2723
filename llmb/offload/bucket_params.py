"""Named parameters of a model inside parameter buckets, and their initial values.

    for param in param_slices(model, bucket):
        tensors[param.tensor][param.rows] == network.get_parameter(param.name)[param.source]

`tensors` are the bucket's, of its weights, their gradients or their moments: `buffer_views.bucket_tensors`.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import has_llama_layers
from llmb.config.spec import Model
from llmb.models.architectures import build_model
from llmb.models.decoder import parameter_generator
from llmb.offload.buffer_views import bucket_tensors
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.layer_params import layer_param_shapes

ALL = slice(None)

Scratch = Callable[[torch.Size], Tensor]  # fp32 memory on the device for a tensor of this shape


class ParamSlice(NamedTuple):
    """A parameter, or some rows of one, inside a bucket."""

    name: str
    tensor: int  # index in the bucket
    rows: slice  # of that tensor
    source: slice  # rows of the parameter


def param_slices(model: Model, bucket: int) -> list[ParamSlice]:
    """Return the parameters in a bucket, in memory order."""
    if bucket < model.layers:
        return _layer_slices(model, f"layers.{bucket}")
    buckets = ParamBuckets(model)
    is_head = bucket in buckets.head and not model.tied_embeddings
    shard = bucket - (buckets.head if is_head else buckets.embedding).start
    rows = buckets.shard_rows(shard)
    name = "head.weight" if is_head else "embedding.weight"
    slices = [ParamSlice(name, 0, ALL, slice(rows.start, rows.stop))]
    return [*slices, ParamSlice("norm.weight", 1, ALL, ALL)] if bucket == buckets.head[-1] else slices


@torch.no_grad()
def init_bucket_weights(model: Model, seed: int, weights_of: Callable[[int], Tensor], scratch: Scratch) -> None:
    """Initialise all weights, straight to where each bucket lives.

    They equal those of `build_model(model).init_weights(seed)` on the same device: a parameter's values depend on the
    seed and its name alone. A parameter is drawn whole, in fp32, in scratch memory. `weights_of(bucket)`: its elements.
    """
    with torch.device("meta"):
        network = build_model(model)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    for name, slices in _slices_by_parameter(model).items():
        values = scratch(shapes[name])
        network.init_parameter(name, values, parameter_generator(seed, name, values.device))
        for bucket, param in slices:
            tensors = bucket_tensors(weights_of(bucket), ParamBuckets(model).tensors(bucket))
            tensors[param.tensor][param.rows].copy_(values[param.source])


def _slices_by_parameter(model: Model) -> dict[str, list[tuple[int, ParamSlice]]]:
    """Return the buckets and slices of each parameter."""
    slices: dict[str, list[tuple[int, ParamSlice]]] = defaultdict(list)
    for bucket in range(ParamBuckets(model).count):
        for param in param_slices(model, bucket):
            slices[param.name].append((bucket, param))
    return slices


def _layer_slices(model: Model, layer: str) -> list[ParamSlice]:
    if not has_llama_layers(model):
        return [ParamSlice(f"{layer}.{name}", i, ALL, ALL) for i, name in enumerate(layer_param_shapes(model))]
    heads = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    slices = [
        *_stacked(0, {f"{layer}.attention.{name}.weight": count * model.head_dim for name, count in heads.items()}),
        ParamSlice(f"{layer}.attention.o.weight", 1, ALL, ALL),
        *_stacked(2, {f"{layer}.mlp.{name}.weight": model.ffn for name in ("gate", "up")}),
        ParamSlice(f"{layer}.mlp.down.weight", 3, ALL, ALL),
        ParamSlice(f"{layer}.attention_norm.weight", 4, ALL, ALL),
        ParamSlice(f"{layer}.mlp_norm.weight", 5, ALL, ALL),
    ]
    if model.qkv_bias:
        slices += _stacked(
            6, {f"{layer}.attention.{name}_bias": count * model.head_dim for name, count in heads.items()}
        )
    if model.qk_norm is not None:
        first = 6 + model.qkv_bias  # behind matrices and norms of blocks
        slices += [
            ParamSlice(f"{layer}.attention.{name}_norm.weight", first + i, ALL, ALL) for i, name in enumerate("qk")
        ]
    return slices


def _stacked(tensor: int, rows_of: dict[str, int]) -> list[ParamSlice]:
    """Return parameters whose rows are stacked in one tensor."""
    slices, first = [], 0
    for name, rows in rows_of.items():
        slices.append(ParamSlice(name, tensor, slice(first, first + rows), ALL))
        first += rows
    return slices
