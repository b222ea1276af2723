"""Initial weights of an out-of-core run from a folder in Hugging Face's layout, straight to where each bucket lives.

    load_hf_buckets(Path("Llama-3.1-70B"), model, trainer.edit_tensors, device)

Some rows of one tensor are in memory at a time: they are copied to the device, and from there to their bucket, where
frozen weights may be quantized. So neither side ever holds the model a second time. Nothing is loaded before the names
and shapes of all tensors are checked.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import has_llama_layers
from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.hf_layout import HfLayout
from llmb.models.hf_weights import StoredTensor as HfTensor
from llmb.models.hf_weights import check_stored, hf_tensors, open_safetensors, stored_tensors
from llmb.offload.bucket_params import EditTensors, ParamSlice, param_slices
from llmb.offload.lora.frozen_weights import store_rows
from llmb.perfmodel.offload.buffers import ParamBuckets


class _Source(NamedTuple):
    """Where a parameter is: rows of a tensor in a file, and how they are ordered there."""

    hf_name: str
    first: int
    rows: int
    layout: HfLayout | None


def load_hf_buckets(folder: Path, model: Model, edit_tensors: EditTensors, device: torch.device) -> None:
    """Load all buckets, one after the other."""
    if not has_llama_layers(model):
        raise ConfigError(f"weights={folder}: out-of-core training loads weights of Llama layers, not of {model.name}")
    sources, shapes = _sources(model)
    stored = stored_tensors(folder)
    check_stored(folder, shapes, stored)
    for bucket in range(ParamBuckets(model).count):
        with edit_tensors(bucket) as tensors:
            for param in param_slices(model, bucket):
                values = _read(sources[param.name], param, stored).to(device)
                store_rows(tensors[param.tensor], param.rows, values)


def _sources(model: Model) -> tuple[dict[str, _Source], dict[str, list[int]]]:
    """Return the source of each parameter, and the shapes of all tensors in the files."""
    with torch.device("meta"):
        files = hf_tensors(build_model(model))
    return dict(_parts(files)), {name: tensor.shape for name, tensor in files.items()}


def _parts(files: dict) -> Iterator[tuple[str, _Source]]:
    for hf_name, tensor in files.items():
        first = 0
        for name, part, layout in zip(tensor.names, tensor.parts, tensor.layouts, strict=True):
            yield name, _Source(hf_name, first, len(part), layout)
            first += len(part)


def _read(source: _Source, param: ParamSlice, stored: dict[str, HfTensor]) -> Tensor:
    """Return the rows of a parameter that a bucket holds."""
    begin, end, _ = param.source.indices(source.rows)
    # Opened for each tensor: pages read of an open file count as memory of this process until it is closed.
    with open_safetensors(stored[source.hf_name].file) as file:
        rows: Tensor = file.get_slice(source.hf_name)[source.first + begin : source.first + end]
    if source.layout is None:
        return rows
    assert end - begin == source.rows, "shards of the vocabulary have the order of files"
    return source.layout.from_hf(rows.float())
