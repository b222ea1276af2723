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

from llmb.config.huggingface.hf_config import HF_ARCHITECTURES, to_hf_config
from llmb.config.serialization import read_json
from llmb.config.spec import Model
from llmb.errors import ConfigError, LaunchError
from llmb.models.architectures import ARCHITECTURES, Network

SHARD_BYTES = 5_000_000_000
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Prefix in files of what `transformers` calls "model." in memory, where they differ.
HF_PREFIXES = {"nemotron_h": "backbone."}


def save_weights(network: Network, folder: Path, dtype: torch.dtype, shard_bytes: float = SHARD_BYTES) -> None:
    """Write the weights as `dtype`, with a config.json, to a folder that does not exist yet or is empty.

    Buffers keep their own dtype, which they need for precision.
    """
    pieces, names, layouts = hf_pieces(network), hf_names(network), type(network).hf_layouts(network.model)
    buffer_dtypes = {names[name]: buffer.dtype for name, buffer in network.named_buffers() if name in names}
    dtypes = {hf_name: buffer_dtypes.get(hf_name, dtype) for hf_name in pieces}
    sizes = {
        hf_name: sum(tensor.numel() for _, tensor in parts) * dtypes[hf_name].itemsize
        for hf_name, parts in pieces.items()
    }

    def file_tensor(hf_name: str) -> Tensor:
        tensors = []
        for name, tensor in pieces[hf_name]:
            layout = layouts.get(name)
            tensors.append((tensor if layout is None else layout.to_hf(tensor)).to("cpu", dtypes[hf_name]).contiguous())
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    tensor_iterator = ((hf_name, file_tensor(hf_name)) for hf_name in pieces)  # lazily, one by one
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
    pieces, layouts = hf_pieces(network), type(network).hf_layouts(network.model)
    stored = stored_tensors(folder)
    _check_names(folder, pieces, stored)
    _check_shapes(folder, hf_shapes(network), stored)
    for hf_name, parts in pieces.items():
        # Opened for each tensor: pages read of an open file count as memory of this process until it is closed.
        with open_safetensors(stored[hf_name].file) as shard:
            file_tensor, start = shard.get_tensor(hf_name), 0
            for name, tensor in parts:
                rows = file_tensor if len(parts) == 1 else file_tensor[start : start + len(tensor)]
                tensor.copy_(layouts[name].from_hf(rows.float()) if name in layouts else rows)
                start += 0 if len(parts) == 1 else len(tensor)


def _write_shard(file: Path, names: list[str], tensor_iterator: Iterator[tuple[str, Tensor]]) -> None:
    """Write one shard; its tensors are freed on return, so that the host never holds two shards."""
    tensors = dict(islice(tensor_iterator, len(names)))
    assert list(tensors) == names, "tensors must come in the order of sizes"
    save_file(tensors, file, metadata={"format": "pt"})


def hf_pieces(network: Network) -> dict[str, list[tuple[str, Tensor]]]:
    """Return our names and tensors by Hugging Face name, in our layout; stacked experts are unbound.

    Several are the rows of one tensor in files, first to last.
    """
    state = network.state_dict()
    pieces: dict[str, list[tuple[str, Tensor]]] = {}
    for name, hf_name in hf_names(network).items():
        if "{expert}" in hf_name:
            for expert, tensor in enumerate(state[name].unbind()):
                pieces[hf_name.format(expert=expert)] = [(name, tensor)]
        else:
            pieces.setdefault(hf_name, []).append((name, state[name]))
    return pieces


def hf_shapes(network: Network) -> dict[str, list[int]]:
    """Return the shapes of the tensors in files, by their names."""
    shapes = {}
    for hf_name, parts in hf_pieces(network).items():
        shapes[hf_name] = [*parts[0][1].shape]
        if len(parts) > 1:
            shapes[hf_name][0] = sum(len(tensor) for _, tensor in parts)
    return shapes


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
    temporary = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}")
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


def _check_shapes(folder: Path, shapes: dict[str, list[int]], stored: dict[str, StoredTensor]) -> None:
    errors = [
        f"{name} {stored[name].shape} (the model has {shape})"
        for name, shape in shapes.items()
        if stored[name].shape != shape
    ]
    if errors:
        raise ConfigError(f"{folder} has {summarize_names(errors, 'tensor')} of another shape")


def summarize_names(names: list[str], noun: str) -> str:
    """Return the count and the first few names."""
    ellipsis = ", ..." if len(names) > 3 else ""
    return f"{len(names)} {noun}{'s' * (len(names) > 1)} ({', '.join(names[:3])}{ellipsis})"
