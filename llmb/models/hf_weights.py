"""Saving and loading weights in Hugging Face's layout: model.safetensors, or numbered shards and their index.

    save_weights(network, Path("my-llama"), torch.bfloat16)
    load_weights(network, Path("Llama-3.1-8B"))      # hf_config.load_hf_config returns the model of a folder

Both stream: the host holds one shard when saving and one tensor when loading, whatever the size of the model. A folder
is renamed to its name when it is complete, and nothing is loaded before the names and shapes of all tensors are
checked.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmb.config.serialization import read_json, temporary_path
from llmb.config.spec import Model
from llmb.errors import ConfigError, LaunchError
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.hf_config import HF_ARCHITECTURES, to_hf_config
from llmb.models.hf_layout import GroupedRowLayout

SHARD_BYTES = 5_000_000_000
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Prefix in files of what `transformers` calls "model." in memory, where they differ.
HF_PREFIXES = {"nemotron_h": "backbone."}


def save_weights(network: Network, folder: Path, dtype: torch.dtype, shard_bytes: float = SHARD_BYTES) -> None:
    """Write the weights as `dtype`, with a config.json, to a folder that does not exist yet or is empty.

    Buffers keep their own dtype, which they need for precision.
    """
    tensors, names, layouts = hf_tensors(network), hf_names(network), hf_layouts(network)
    buffer_dtypes = {names[name]: buffer.dtype for name, buffer in network.named_buffers() if name in names}
    dtypes = {name: buffer_dtypes.get(name, dtype) for name in tensors}
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in tensors.items()}

    def file_tensor(name: str) -> Tensor:
        tensor = tensors[name].to("cpu", dtypes[name]).contiguous()
        return layouts[name].to_hf(tensor) if name in layouts else tensor

    tensor_iterator = ((name, file_tensor(name)) for name in tensors)  # lazily, one by one
    save_tensors(network.model, tensor_iterator, sizes, folder, dtype, shard_bytes)


def save_tensors(
    model: Model,
    tensors: Iterable[tuple[str, Tensor]],
    sizes: dict[str, int],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: float = SHARD_BYTES,
) -> None:
    """Write tensors from an iterator in the order of `sizes`, which maps their names in files to bytes.

    A tensor is held until its shard is written. `dtype` goes to config.json.
    """
    shards = plan_shards(sizes, shard_bytes)
    config = to_hf_config(model) if model.architecture in HF_ARCHITECTURES else None
    with _atomic_folder(folder) as temporary:
        weight_map: dict[str, str] = {}
        iterator = iter(tensors)
        for number, names in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            _write_shard(temporary / file, names, iterator)
            weight_map |= dict.fromkeys(names, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (temporary / INDEX_FILE).write_text(json.dumps(index, indent=1))
        if config is not None:
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
            (temporary / "config.json").write_text(json.dumps(config, indent=1))


def load_weights(network: Network, folder: Path) -> None:
    """Load a folder into the network, keeping the dtypes and devices of its tensors."""
    tensors, layouts = hf_tensors(network), hf_layouts(network)
    stored = stored_tensors(folder)
    _check_names(folder, tensors, stored)
    _check_shapes(folder, tensors, stored)
    for name, tensor in tensors.items():
        # Opened for each tensor: pages read of an open file count as memory of this process until it is closed.
        with open_safetensors(stored[name].file) as shard:
            file_tensor = shard.get_tensor(name)
            tensor.copy_(layouts[name].from_hf(file_tensor) if name in layouts else file_tensor)


def _write_shard(file: Path, names: list[str], tensor_iterator: Iterator[tuple[str, Tensor]]) -> None:
    """Write one shard; its tensors are freed on return, so that the host never holds two shards."""
    tensors = dict(islice(tensor_iterator, len(names)))
    assert list(tensors) == names, "tensors must come in the order of sizes"
    save_file(tensors, file, metadata={"format": "pt"})


def hf_tensors(network: Network) -> dict[str, Tensor]:
    """Return the network's tensors by Hugging Face name, rows in our layout; stacked experts are unbound."""
    state = network.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, hf_name in hf_names(network).items():
        if "{expert}" in hf_name:
            for expert, tensor in enumerate(state[name].unbind()):
                tensors[hf_name.format(expert=expert)] = tensor
        else:
            tensors[hf_name] = state[name]
    return tensors


def hf_layouts(network: Network) -> dict[str, GroupedRowLayout]:
    """Return row layouts by Hugging Face name, for tensors whose rows are in another order in files."""
    names = hf_names(network)
    return {names[name]: layout for name, layout in type(network).hf_layouts(network.model).items()}


def hf_names(network: Network) -> dict[str, str]:
    """Map our names to names in files; `{expert}` is the index along dimension 0 of ours."""
    architecture: Any = ARCHITECTURES[network.model.architecture]
    prefix = HF_PREFIXES.get(network.model.architecture, "model.")
    names: dict[str, str] = architecture.hf_names(network.model)
    return {name: re.sub(r"^model\.", prefix, hf_name) for name, hf_name in names.items()}


def plan_shards(sizes: dict[str, int], shard_bytes: float) -> list[list[str]]:
    """Return the names of each shard, in order; a tensor larger than a shard has its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end or deleted."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; weights are written to a new folder")
    temporary = temporary_path(folder.absolute())
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise LaunchError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class StoredTensor:
    """File, shape and dtype of a tensor on disk."""

    file: Path
    shape: list[int]
    dtype: str  # as safetensors calls it: BF16, F8_E4M3


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder by name."""
    stored = {}
    for file in _files(folder):
        with open_safetensors(file) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                tensor = shard.get_slice(name)
                stored[name] = StoredTensor(file, tensor.get_shape(), tensor.get_dtype())
    return stored


def _files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, or raise a ConfigError if some are missing."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ConfigError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    index = read_json(folder / INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{folder / INDEX_FILE} has no weight_map of tensors and their files")
    files = sorted({folder / name for name in weight_map.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder / INDEX_FILE} names {summarize_names(missing, 'file')} not there")
    return files


@contextmanager
def open_safetensors(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is cut off or not a safetensors file: {error}") from error


def _check_names(folder: Path, tensors: Iterable[str], stored: Iterable[str]) -> None:
    missing, extra = sorted(set(tensors) - set(stored)), sorted(set(stored) - set(tensors))
    errors = [f"lacks {summarize_names(missing, 'tensor')}"] * bool(missing)
    errors += [f"has {summarize_names(extra, 'tensor')} that the model does not"] * bool(extra)
    if errors:
        raise ConfigError(f"{folder} {' and '.join(errors)}")


def _check_shapes(folder: Path, tensors: dict[str, Tensor], stored: dict[str, StoredTensor]) -> None:
    errors = [
        f"{name} {stored[name].shape} (the model has {[*tensor.shape]})"
        for name, tensor in tensors.items()
        if stored[name].shape != [*tensor.shape]
    ]
    if errors:
        raise ConfigError(f"{folder} has {summarize_names(errors, 'tensor')} of another shape")


def summarize_names(names: list[str], noun: str) -> str:
    """Return the count and the first few names."""
    ellipsis = ", ..." if len(names) > 3 else ""
    return f"{len(names)} {noun}{'s' * (len(names) > 1)} ({', '.join(names[:3])}{ellipsis})"
