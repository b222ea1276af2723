"""Named parameters of a model inside parameter buckets, and their initial values.

    for param in param_slices(model, bucket):
        tensors[param.tensor][param.rows] == network.get_parameter(param.name)[param.source]

`tensors` are the bucket's, of its weights, their gradients or their moments: `buffer_views.bucket_tensors`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers, layer_weight_shapes
from llmb.models.architectures import build_model
from llmb.models.decoder import parameter_generator
from llmb.offload.lora.frozen_weights import StoredTensor, store_rows
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.layer_params import layer_param_shapes

ALL = slice(None)
# Tensors of a Llama layer's bucket that are one parameter each.
WHOLE = {
    "wo_CA": "attention.o", "w2_CF": "mlp.down", "norm1_C": "attention_norm", "norm2_C": "mlp_norm",
    "q_norm_D": "attention.q_norm", "k_norm_D": "attention.k_norm", "post_norm1_C": "attention_post_norm",
    "post_norm2_C": "mlp_post_norm",
}  # fmt: skip

EditTensors = Callable[[int], AbstractContextManager[list[StoredTensor]]]
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
def init_bucket_weights(model: Model, seed: int, edit_tensors: EditTensors, scratch: Scratch) -> None:
    """Initialise all weights, straight to where each bucket lives.

    They equal those of `build_model(model).init_weights(seed)` on the same device: a parameter's values depend on the
    seed and its name alone. `edit_tensors(bucket)`: its tensors, while a context is open.
    """
    for bucket, drawn in groupby(_initial_values(model, seed, scratch), key=lambda values: values[0]):
        with edit_tensors(bucket) as tensors:
            for _, param, values in drawn:
                store_rows(tensors[param.tensor], param.rows, values)


def _initial_values(model: Model, seed: int, scratch: Scratch) -> Iterator[tuple[int, ParamSlice, Tensor]]:
    """Yield each slice with its bucket and values, in scratch memory: a parameter is drawn whole, in fp32."""
    with torch.device("meta"):
        network = build_model(model)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    for name, slices in _slices_by_parameter(model).items():
        values = scratch(shapes[name])
        network.init_parameter(name, values, parameter_generator(seed, name, values.device))
        for bucket, param in slices:
            yield bucket, param, values[param.source]


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
    counts = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    heads = {name: count * model.head_dim for name, count in counts.items()}
    rows = {  # of the parameters that are stacked in one tensor
        "wqkv_XC": {f"attention.{name}.weight": count for name, count in heads.items()},
        "w13_2FC": {f"mlp.{name}.weight": model.ffn for name in ("gate", "up")},
        "bqkv_X": {f"attention.{name}_bias": count for name, count in heads.items()},
    }
    slices: list[ParamSlice] = []
    for tensor, name in enumerate(layer_weight_shapes(model)):
        first = 0
        for parameter, count in rows.get(name, {}).items():
            slices.append(ParamSlice(f"{layer}.{parameter}", tensor, slice(first, first + count), ALL))
            first += count
        if name in WHOLE:
            slices.append(ParamSlice(f"{layer}.{WHOLE[name]}.weight", tensor, ALL, ALL))
    return slices
