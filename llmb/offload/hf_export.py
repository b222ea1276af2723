"""Export of an out-of-core run's weights to a folder in Hugging Face's layout.

    export(Path("my-llama"), model, buckets)    # as for `offload_checkpoint.save`: ((0, {"param": elements, ...}), ...)

Also of a checkpoint: `((bucket, load(path, bucket)) for bucket in range(ParamBuckets(model).count))`. Buckets come one
by one and in order. Tensors on the host are written from where they are; only vocabulary shards are concatenated, and
what is on the device is copied, at most a file's worth at a time. So the host never holds the model a second time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.architectures import ARCHITECTURES
from llmb.models.hf_weights import EXPERT, SHARD_BYTES, FileTensor, save_tensors
from llmb.offload.bucket_params import ParamSlice, param_slices
from llmb.offload.buffer_views import bucket_tensors
from llmb.perfmodel.offload.buffers import ParamBuckets

BucketTensors = tuple[int, dict[str, Tensor]]  # its number, and its flat tensors: the weights are "param"


def export(folder: Path, model: Model, buckets: Iterable[BucketTensors], shard_bytes: float = SHARD_BYTES) -> None:
    """Write a folder that does not exist yet or is empty, in the dtype of the weights."""
    remaining = iter(buckets)
    first = next(remaining)
    dtype = first[1]["param"].dtype
    tensors = _parameters(model, chain([first], remaining), dtype)
    save_tensors(model, tensors, _sizes(model, dtype), folder, dtype, shard_bytes)


def _parameters(model: Model, buckets: Iterable[BucketTensors], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters by their Hugging Face names, and experts one by one where files hold them so."""
    network: Any = ARCHITECTURES[model.architecture]
    names, layouts = network.hf_names(model), network.hf_layouts(model)
    hf_counts, shards = Counter(names.values()), list[Tensor]()
    parts: dict[str, Tensor] = {}  # of one tensor in files
    for bucket, tensors in buckets:
        views = bucket_tensors(tensors["param"], ParamBuckets(model).tensors(bucket))
        for param in param_slices(model, bucket):
            shards.append(views[param.tensor][param.rows].cpu())
            if _is_last(model, param):
                parts[param.name] = shards[0] if len(shards) == 1 else torch.cat(shards)
                shards, hf_name = [], names[param.name]
                if len(parts) == hf_counts[hf_name]:
                    for name, values in _files_of(hf_name, [*parts.values()]):
                        file_layouts = tuple(layouts.get(part) for part in parts)
                        yield name, FileTensor(tuple(parts), values, file_layouts).value(dtype)
                    parts = {}


def _files_of(hf_name: str, parts: list[Tensor]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the tensors in files that these parts are: one, or one for each expert."""
    if EXPERT not in hf_name:
        yield hf_name, tuple(parts)
        return
    for expert, values in enumerate(zip(*parts, strict=True)):
        yield hf_name.format(expert=expert), values


def _sizes(model: Model, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each tensor by its Hugging Face name, in the order of `_parameters`."""
    network: Any = ARCHITECTURES[model.architecture]
    names, sizes = network.hf_names(model), dict[str, int]()
    buckets = ParamBuckets(model)
    for bucket in range(buckets.count):
        shapes = buckets.tensors(bucket)
        for param in param_slices(model, bucket):
            rows, *columns = shapes[param.tensor]
            hf_name, num_rows = names[param.name], len(range(rows)[param.rows])
            experts = num_rows if EXPERT in hf_name else 1
            for expert in range(experts):
                name = hf_name.format(expert=expert)
                sizes[name] = sizes.get(name, 0) + num_rows // experts * prod(columns) * dtype.itemsize
    return sizes


def _is_last(model: Model, param: ParamSlice) -> bool:
    """Return whether the parameter is complete with these rows."""
    return param.source.stop in (None, model.vocab)
