"""Saving and loading weights in Hugging Face's layout: model.safetensors, or numbered shards and their index.

    save_weights(network, Path("my-llama"), torch.bfloat16)
    load_weights(network, Path("Llama-3.1-8B"))      # hf_config.load_hf_config returns the model of a folder

Both stream: the host holds one shard when saving, and when loading one tensor, or one expert where a tensor has the
matrices of all, whatever the size of the model. A folder is renamed to its name when it is complete, and nothing is
loaded before the names and shapes of all tensors are checked.

`save_weights(..., mxfp4_experts=True)` writes stacked experts as published gpt-oss folders hold them, NAME_blocks and
NAME_scales (`ops/quant/mxfp4.py`); `load_weights` reads both.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmb.config.huggingface.hf_config import HF_ARCHITECTURES, to_hf_config
from llmb.config.model import Model
from llmb.config.serialization import read_json, temporary_path
from llmb.errors import ConfigError, LaunchError
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.hf_layout import ExpertStackLayout, HfLayout
from llmb.ops.quant.mxfp4 import MXFP4_GROUP, Mxfp4, dequantize_mxfp4, quantize_mxfp4

SHARD_BYTES = 5_000_000_000
MXFP4_SUFFIXES = ("_blocks", "_scales")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Prefix in files of what `transformers` calls "model." in memory, where they differ.
HF_PREFIXES = {"nemotron_h": "backbone."}
# Of a model with a vision tower the text model is loaded. Prefix of its tensors in files -> without the tower.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "{expert}"  # in names of files that hold one tensor for each expert
COMPARED_ROWS = 4096  # at a time


def save_weights(
    network: Network,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: float = SHARD_BYTES,
    mxfp4_experts: bool = False,
) -> None:
    """Write the weights as `dtype`, with a config.json, to a folder that does not exist yet or is empty.

    Buffers keep their own dtype, which they need for precision.
    """
    tensors, names = hf_tensors(network), hf_names(network)
    buffer_dtypes = {names[name]: buffer.dtype for name, buffer in network.named_buffers() if name in names}
    writers: dict[str, Callable[[], Tensor]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if mxfp4_experts and tensor.is_expert_matrix:
            for suffix, stored in zip(MXFP4_SUFFIXES, tensor.mxfp4_shapes, strict=True):
                sizes[f"{name}{suffix}"] = math.prod(stored)
                writers[f"{name}{suffix}"] = partial(_mxfp4_tensor, tensor, suffix)
        else:
            file_dtype = buffer_dtypes.get(name, dtype)
            sizes[name] = math.prod(tensor.shape) * file_dtype.itemsize
            writers[name] = partial(tensor.value, file_dtype)
    tensor_iterator = ((name, write()) for name, write in writers.items())  # lazily, one by one
    save_tensors(network.model, tensor_iterator, sizes, folder, dtype, shard_bytes, mxfp4_experts)


def _mxfp4_tensor(tensor: "FileTensor", suffix: str) -> Tensor:
    packed, scales = quantize_mxfp4(tensor.value(torch.float32).mT.contiguous())
    return scales if suffix == MXFP4_SUFFIXES[1] else packed.unflatten(-1, (-1, MXFP4_GROUP // 2))


def save_tensors(
    model: Model,
    tensors: Iterable[tuple[str, Tensor]],
    sizes: dict[str, int],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: float = SHARD_BYTES,
    mxfp4_experts: bool = False,
) -> None:
    """Write tensors from an iterator in the order of `sizes`, which maps their names in files to bytes.

    A tensor is held until its shard is written. `dtype` goes to config.json.
    """
    shards = plan_shards(sizes, shard_bytes)
    config = to_hf_config(model) if model.architecture in HF_ARCHITECTURES else None
    with atomic_folder(folder) as temporary:
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
            if mxfp4_experts:
                config["quantization_config"] = {"quant_method": "mxfp4"}
            (temporary / "config.json").write_text(json.dumps(config, indent=1))


def load_weights(network: Network, folder: Path) -> None:
    """Load a folder into the network, keeping the dtypes and devices of its tensors."""
    tensors, stored = hf_tensors(network), stored_tensors(folder)
    check_tensors(folder, tensors, stored)
    for name, tensor in tensors.items():
        if tensor.is_expert_matrix:
            for expert in range(tensor.shape[0]):
                tensor.load_expert(expert, _read_expert(name, expert, stored))
        else:
            tensor.load(_read(name, stored))


def check_tensors(folder: Path, tensors: dict[str, "FileTensor"], stored: dict[str, "StoredTensor"]) -> None:
    """Refuse a folder whose tensors are not those of a network, stacks of experts as they are or in MXFP4."""
    expected: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if name not in stored and mxfp4_names(name)[0] in stored:
            expected |= dict(zip(mxfp4_names(name), tensor.mxfp4_shapes, strict=True))
        else:
            expected[name] = tensor.shape
    _check_names(folder, expected, stored)
    _check_shapes(folder, expected, stored)


def read_expert(hf_name: str, expert: int, layout: HfLayout | None, stored: dict[str, "StoredTensor"]) -> Tensor:
    """Return one expert of our tensor, as a stack of one, from its own file tensor or from the stack of all."""
    if EXPERT in hf_name:
        return _read(hf_name.format(expert=expert), stored)[None]
    assert layout is not None
    return layout.from_hf(_read_expert(hf_name, expert, stored))


def _read(name: str, stored: dict[str, "StoredTensor"]) -> Tensor:
    # Opened for each tensor: pages read of an open file count as memory of this process until it is closed.
    with open_safetensors(stored[name].file) as shard:
        return shard.get_tensor(stored[name].name)


def _read_expert(name: str, expert: int, stored: dict[str, "StoredTensor"]) -> Tensor:
    if name not in stored:
        return _read_mxfp4_expert(name, expert, stored)
    with open_safetensors(stored[name].file) as shard:
        experts: Any = shard.get_slice(stored[name].name)
        rows: Tensor = experts[expert : expert + 1]
        return rows


def _read_mxfp4_expert(name: str, expert: int, stored: dict[str, "StoredTensor"]) -> Tensor:
    blocks, scales = (_read_expert(part, expert, stored) for part in mxfp4_names(name))
    return dequantize_mxfp4(Mxfp4(blocks.flatten(-2), scales)).mT


def mxfp4_names(name: str) -> tuple[str, str]:
    """Return the names of the two tensors that hold an MXFP4 tensor: values and scales."""
    return f"{name}{MXFP4_SUFFIXES[0]}", f"{name}{MXFP4_SUFFIXES[1]}"


def _write_shard(file: Path, names: list[str], tensor_iterator: Iterator[tuple[str, Tensor]]) -> None:
    """Write one shard; its tensors are freed on return, so that the host never holds two shards."""
    tensors = dict(islice(tensor_iterator, len(names)))
    assert list(tensors) == names, "tensors must come in the order of sizes"
    save_file(tensors, file, metadata={"format": "pt"})


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: one of the network's, one expert of it, or several, as consecutive rows or stacked."""

    names: tuple[str, ...]  # of the network's tensors
    parts: tuple[Tensor, ...]
    layouts: tuple[HfLayout | None, ...]  # of each part; none: as in the network

    @property
    def stack(self) -> ExpertStackLayout | None:
        """The layout of the first part, if this is a stack of experts."""
        return self.layouts[0] if isinstance(self.layouts[0], ExpertStackLayout) else None

    @property
    def is_expert_matrix(self) -> bool:
        """Whether it is a matrix of all experts, which MXFP4 files hold quantized."""
        return self.stack is not None and self.stack.transposed

    @property
    def shape(self) -> list[int]:
        return [*self._joined([torch.empty(part.shape, device="meta") for part in self.parts]).shape]

    @property
    def mxfp4_shapes(self) -> tuple[list[int], list[int]]:
        """Shapes of values and scales; those are of matrices [out, in], unlike an unquantized stack."""
        experts, inputs, outputs = self.shape
        groups = [experts, outputs, inputs // MXFP4_GROUP]
        return [*groups, MXFP4_GROUP // 2], groups

    def value(self, dtype: torch.dtype) -> Tensor:
        """Return what the file holds, on the host."""
        return self._joined(list(self.parts)).to("cpu", dtype).contiguous()

    def load(self, tensor: Tensor) -> None:
        """Copy a file's tensor into the network."""
        start = 0
        for part, layout in zip(self.parts, self.layouts, strict=True):
            rows = tensor if self.stack or len(self.parts) == 1 else tensor[start : start + len(part)]
            part.copy_(rows if layout is None else layout.from_hf(rows.float()))
            start += len(part)

    def load_expert(self, expert: int, matrix: Tensor) -> None:
        """Copy the matrix of one expert of a file's stack, [1, I, O], into the network."""
        for part, layout in zip(self.parts, self.layouts, strict=True):
            assert layout is not None
            part[expert].copy_(layout.from_hf(matrix)[0])

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        if self.stack is not None:
            return self.stack.stack(*tensors)
        rows = [x if layout is None else layout.to_hf(x) for x, layout in zip(tensors, self.layouts, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def hf_tensors(network: Network) -> dict[str, FileTensor]:
    """Return the tensors of files by name; our stacked experts are unbound where files have one tensor for each."""
    state, layouts = network.state_dict(), type(network).hf_layouts(network.model)
    tensors: dict[str, FileTensor] = {}
    for name, hf_name in hf_names(network).items():
        if EXPERT in hf_name:
            for expert, tensor in enumerate(state[name].unbind()):
                tensors[hf_name.format(expert=expert)] = FileTensor((name,), (tensor,), (layouts.get(name),))
        else:
            earlier = tensors.get(hf_name, FileTensor((), (), ()))
            parts = (*earlier.names, name), (*earlier.parts, state[name]), (*earlier.layouts, layouts.get(name))
            tensors[hf_name] = FileTensor(*parts)
    return tensors


def hf_names(network: Network) -> dict[str, str]:
    """Map our names to names in files; `{expert}` is the index along dimension 0 of ours. Parts have the same."""
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
def atomic_folder(folder: Path) -> Iterator[Path]:
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
    name: str  # in the file
    shape: list[int]
    dtype: str  # as safetensors calls it: BF16, F8_E4M3


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder's text model by name."""
    stored = {}
    for file in _files(folder):
        with open_safetensors(file) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if not name.startswith(VISION_PREFIXES):
                    tensor = shard.get_slice(name)
                    stored[_text_name(name)] = StoredTensor(file, name, tensor.get_shape(), tensor.get_dtype())
    return stored


def _text_name(name: str) -> str:
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    return TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def unused_tensors(expected: Container[str], stored: dict[str, StoredTensor]) -> set[str]:
    """Return stored tensors that a network does not need: older files' RoPE frequencies, a copy of a tied head."""
    unused = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    if HEAD in stored and HEAD not in expected and EMBEDDING in stored and _are_equal(stored[HEAD], stored[EMBEDDING]):
        unused.add(HEAD)
    return unused


def _are_equal(left: StoredTensor, right: StoredTensor) -> bool:
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    with open_safetensors(left.file) as left_file, open_safetensors(right.file) as right_file:
        left_rows, right_rows = left_file.get_slice(left.name), right_file.get_slice(right.name)
        return all(
            torch.equal(left_rows[first : first + COMPARED_ROWS], right_rows[first : first + COMPARED_ROWS])
            for first in range(0, left.shape[0], COMPARED_ROWS)
        )


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


def _check_names(folder: Path, expected: dict[str, list[int]], stored: dict[str, StoredTensor]) -> None:
    missing = sorted(expected.keys() - stored.keys())
    extra = sorted(stored.keys() - expected.keys() - unused_tensors(expected, stored))
    errors = [f"lacks {summarize_names(missing, 'tensor')}"] * bool(missing)
    errors += [f"has {summarize_names(extra, 'tensor')} that the model does not"] * bool(extra)
    if errors:
        raise ConfigError(f"{folder} {' and '.join(errors)}")


def _check_shapes(folder: Path, expected: dict[str, list[int]], stored: dict[str, StoredTensor]) -> None:
    errors = [
        f"{name} {stored[name].shape} (the model has {shape})"
        for name, shape in expected.items()
        if stored[name].shape != shape
    ]
    if errors:
        raise ConfigError(f"{folder} has {summarize_names(errors, 'tensor')} of another shape")


def summarize_names(names: list[str], noun: str) -> str:
    """Return the count and the first few names."""
    ellipsis = ", ..." if len(names) > 3 else ""
    return f"{len(names)} {noun}{'s' * (len(names) > 1)} ({', '.join(names[:3])}{ellipsis})"
