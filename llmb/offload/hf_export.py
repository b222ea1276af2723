"""The weights of an out-of-core run as a model that others can load: a folder in Hugging Face's layout.

    export(Path("my-llama"), model, units)      # units as for `checkpoint.save`: ((0, {"param": numbers, ...}), ...)

Also of a checkpoint: `((unit, load(path, unit)) for unit in range(Units(model).count))`. Units come one by one and in
their order. What lies on the host is written from where it lies; only the parts of a vocabulary are joined, and what is
on the device is brought over, at most a shard of it at a time. So the host never holds the model a second time.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.hf_weights import SHARD_BYTES, save_tensors
from llmb.models.llama import Llama
from llmb.offload.bucket_params import Place, places
from llmb.offload.buffer_views import unit_tensors
from llmb.perfmodel.offload.buffers import Units

UnitWeights = tuple[int, dict[str, Tensor]]  # its number, and its tensors: flat, the weights are "param"


def export(folder: Path, model: Model, units: Iterable[UnitWeights], shard_bytes: float = SHARD_BYTES) -> None:
    """Write a folder that does not exist yet or is empty, in the number format of the weights."""
    coming = iter(units)
    first = next(coming)
    dtype = first[1]["param"].dtype
    whole = _whole_tensors(model, chain([first], coming))
    save_tensors(model, whole, _sizes(model, dtype), folder, dtype, shard_bytes)


def _whole_tensors(model: Model, units: Iterable[UnitWeights]) -> Iterator[tuple[str, Tensor]]:
    """By their names in files."""
    names = Llama.foreign_names(model)
    parts: list[Tensor] = []
    for unit, tensors in units:
        inside = unit_tensors(tensors["param"], Units(model).tensors(unit))
        for place in places(model, unit):
            parts.append(inside[place.tensor][place.rows].cpu())
            if _is_last(model, place):
                yield names[place.name], parts[0] if len(parts) == 1 else torch.cat(parts)
                parts = []


def _sizes(model: Model, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each tensor by its name in files, in the order in which they become whole."""
    names, sizes = Llama.foreign_names(model), dict[str, int]()
    units = Units(model)
    for unit in range(units.count):
        shapes = units.tensors(unit)
        for place in places(model, unit):
            rows, *rest = shapes[place.tensor]
            taken = len(range(rows)[place.rows])
            sizes[names[place.name]] = sizes.get(names[place.name], 0) + taken * prod(rest) * dtype.itemsize
    return sizes


def _is_last(model: Model, place: Place) -> bool:
    """Whether the parameter is whole with these rows."""
    return place.source.stop in (None, model.vocab)
