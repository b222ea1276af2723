"""Weights in and out, in the layout of Hugging Face: model.safetensors, or numbered shards and their index.

    save_weights(network, Path("my-llama"), torch.bfloat16)
    load_weights(network, Path("Llama-3.1-8B"))      # hugging_face.model_in tells which network the folder is for

Both stream: the host holds one shard when writing and one tensor when reading, whatever the size of the model. A folder
gets its name only when all of it is written, and nothing is read into the network before every tensor's name and shape
is known to be right.
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

from llmb.config.serialization import read_json
from llmb.config.spec import Model
from llmb.errors import ConfigError, LaunchError
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.hf_config import CONFIGURED, to_config
from llmb.models.hf_row_order import RowOrder

SHARD_BYTES = 5_000_000_000
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What `transformers` calls "model." in memory has another name in the files it writes, as in the published ones.
TRUNKS = {"nemotron_h": "backbone."}


def save_weights(network: Network, folder: Path, dtype: torch.dtype, shard_bytes: float = SHARD_BYTES) -> None:
    """Write the weights as `dtype`, with a config.json, to a folder that does not exist yet or is empty.

    Buffers keep their own format: they are what a model must not lose digits of.
    """
    tensors, names_of, orders = foreign_tensors(network), foreign_names(network), foreign_orders(network)
    kept = {names_of[name]: buffer.dtype for name, buffer in network.named_buffers() if name in names_of}
    formats = {name: kept.get(name, dtype) for name in tensors}
    sizes = {name: tensor.numel() * formats[name].itemsize for name, tensor in tensors.items()}

    def as_in_file(name: str) -> Tensor:
        held = tensors[name].to("cpu", formats[name]).contiguous()
        return orders[name].for_file(held) if name in orders else held

    coming = ((name, as_in_file(name)) for name in tensors)  # holds none of them itself
    save_tensors(network.model, coming, sizes, folder, dtype, shard_bytes)


def save_tensors(
    model: Model,
    tensors: Iterable[tuple[str, Tensor]],
    sizes: dict[str, int],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: float = SHARD_BYTES,
) -> None:
    """The same of tensors that are made one by one, in the order of `sizes`: their names in files and their bytes.

    A tensor is held until its shard is written. `dtype` is what config.json says that most of them are.
    """
    shards = plan_shards(sizes, shard_bytes)
    config = to_config(model) if model.architecture in CONFIGURED else None
    with _written_aside(folder) as aside:
        places: dict[str, str] = {}
        coming = iter(tensors)
        for number, names in enumerate(shards, start=1):
            file = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            _write_shard(aside / file, names, coming)
            places |= dict.fromkeys(names, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            (aside / INDEX).write_text(json.dumps(index, indent=1))
        if config is not None:
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
            (aside / "config.json").write_text(json.dumps(config, indent=1))


def load_weights(network: Network, folder: Path) -> None:
    """Fill the network from a folder, each tensor in the number format and on the device where the network has it."""
    tensors, orders = foreign_tensors(network), foreign_orders(network)
    stored = stored_tensors(folder)
    _check_names(folder, tensors, stored)
    _check_shapes(folder, tensors, stored)
    for name, tensor in tensors.items():
        # Opened for each tensor: what was read of an open file counts as memory of this process until it is closed.
        with opened(stored[name].file) as shard:
            found = shard.get_tensor(name)
            tensor.copy_(orders[name].from_file(found) if name in orders else found)


def _write_shard(file: Path, names: list[str], coming: Iterator[tuple[str, Tensor]]) -> None:
    """What it holds on the host is gone when it returns, so that there are never two shards of it."""
    held = dict(islice(coming, len(names)))
    assert list(held) == names, "tensors come in the order of their sizes"
    save_file(held, file, metadata={"format": "pt"})


def foreign_tensors(network: Network) -> dict[str, Tensor]:
    """The network's own tensors by their Hugging Face names, rows in our order; those of stacked experts one by one."""
    own = network.state_dict()
    found: dict[str, Tensor] = {}
    for name, foreign in foreign_names(network).items():
        if "{expert}" in foreign:
            found |= {foreign.format(expert=number): one for number, one in enumerate(own[name].unbind())}
        else:
            found[foreign] = own[name]
    return found


def foreign_orders(network: Network) -> dict[str, RowOrder]:
    """How the rows lie in a file, by its names, of tensors where that differs from ours."""
    names = foreign_names(network)
    return {names[ours]: order for ours, order in type(network).foreign_orders(network.model).items()}


def foreign_names(network: Network) -> dict[str, str]:
    """Our name of a tensor -> its name in a file; `{expert}` counts along dimension 0 of ours."""
    architecture: Any = ARCHITECTURES[network.model.architecture]
    trunk = TRUNKS.get(network.model.architecture, "model.")
    names: dict[str, str] = architecture.foreign_names(network.model)
    return {ours: re.sub(r"^model\.", trunk, foreign) for ours, foreign in names.items()}


def plan_shards(sizes: dict[str, int], shard_bytes: float) -> list[list[str]]:
    """Names for each shard, in order; a tensor larger than a shard has one to itself."""
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
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder beside the wanted one, which takes its name at the end or vanishes."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; weights are written to a new folder")
    aside = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        os.replace(aside, folder)
    except (OSError, SafetensorError) as error:
        raise LaunchError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and as what."""

    file: Path
    shape: list[int]
    dtype: str  # as safetensors calls it: BF16, F8_E4M3


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder."""
    found = {}
    for file in _files(folder):
        with opened(file) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                tensor = shard.get_slice(name)
                found[name] = Stored(file, tensor.get_shape(), tensor.get_dtype())
    return found


def _files(folder: Path) -> list[Path]:
    """The files of a folder that hold weights, all of which are there."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{folder} holds neither {WHOLE} nor {INDEX}")
    index = read_json(folder / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map of tensors and their files")
    files = sorted({folder / name for name in places.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder / INDEX} names {listed(missing, 'file')} not there")
    return files


@contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is cut off or not a safetensors file: {error}") from error


def _check_names(folder: Path, tensors: Iterable[str], stored: Iterable[str]) -> None:
    missing, extra = sorted(set(tensors) - set(stored)), sorted(set(stored) - set(tensors))
    wrong = [f"lacks {listed(missing, 'tensor')}"] * bool(missing)
    wrong += [f"has {listed(extra, 'tensor')} that the model does not"] * bool(extra)
    if wrong:
        raise ConfigError(f"{folder} {' and '.join(wrong)}")


def _check_shapes(folder: Path, tensors: dict[str, Tensor], stored: dict[str, Stored]) -> None:
    wrong = [
        f"{name} {stored[name].shape} (the model has {[*tensor.shape]})"
        for name, tensor in tensors.items()
        if stored[name].shape != [*tensor.shape]
    ]
    if wrong:
        raise ConfigError(f"{folder} has {listed(wrong, 'tensor')} of another shape")


def listed(names: list[str], what: str) -> str:
    """How many, and the first few."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} {what}{'s' * (len(names) > 1)} ({', '.join(names[:3])}{more})"
