"""Initial weights of an out-of-core run from a folder in Hugging Face's layout, straight to where each bucket lives.

    load_hf_buckets(Path("Llama-3.1-70B"), model, trainer.edit_tensors, device)

Some rows of one tensor, or one expert, are in memory at a time: they are copied to the device, and from there to their
bucket, where frozen weights may be quantized. So neither side ever holds the model a second time. Nothing is loaded
before the names and shapes of all tensors are checked.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.architectures import Network, build_model
from llmb.models.hf_layout import ExpertStackLayout, HfLayout
from llmb.models.hf_weights import (
    EXPERT,
    FileTensor,
    check_tensors,
    hf_names,
    hf_tensors,
    open_safetensors,
    read_expert,
    stored_tensors,
)
from llmb.models.hf_weights import StoredTensor as HfTensor
from llmb.offload.bucket_params import EditTensors, ParamSlice, param_slices
from llmb.offload.lora.frozen_weights import store_rows
from llmb.perfmodel.offload.buffers import ParamBuckets


class _Source(NamedTuple):
    """Location of a parameter: rows of a tensor in a file, and their order there."""

    hf_name: str
    first: int
    rows: int
    layout: HfLayout | None


def load_hf_buckets(folder: Path, model: Model, edit_tensors: EditTensors, device: torch.device) -> None:
    """Load all buckets, one after the other."""
    with torch.device("meta"):
        network = build_model(model)
    file_tensors, stored = hf_tensors(network), stored_tensors(folder)
    check_tensors(folder, file_tensors, stored)
    sources = _sources(network, file_tensors)
    for bucket in range(ParamBuckets(model).count):
        with edit_tensors(bucket) as tensors:
            for param in param_slices(model, bucket):
                for rows, values in _read(sources[param.name], param, stored):
                    store_rows(tensors[param.tensor], rows, values.to(device))


def _sources(network: Network, tensors: dict[str, FileTensor]) -> dict[str, _Source]:
    """Return the source of each parameter, of one in several files the name with `{expert}`."""
    names, state, sources = hf_names(network), network.state_dict(), {}
    for tensor in tensors.values():
        first = 0
        for name, part, layout in zip(tensor.names, tensor.parts, tensor.layouts, strict=True):
            sources[name] = _Source(names[name], first, len(state[name]), layout)
            first += len(part)
    return sources


def _read(source: _Source, param: ParamSlice, stored: dict[str, HfTensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of the bucket's tensor with their values, where they are experts one by one."""
    if isinstance(source.layout, ExpertStackLayout) or EXPERT in source.hf_name:
        for expert in range(source.rows):
            yield slice(expert, expert + 1), read_expert(source.hf_name, expert, source.layout, stored)
        return
    begin, end, _ = param.source.indices(source.rows)
    # Opened for each tensor: pages read of an open file count as memory of this process until it is closed.
    with open_safetensors(stored[source.hf_name].file) as file:
        rows: Tensor = file.get_slice(stored[source.hf_name].name)[source.first + begin : source.first + end]
    if source.layout is not None:
        assert end - begin == source.rows, "shards of the vocabulary have the order of files"
        rows = source.layout.from_hf(rows.float())
    yield param.rows, rows
