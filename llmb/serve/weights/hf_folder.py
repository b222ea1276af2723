"""Weights from a Hugging Face folder, in any of the published quantization formats.

    weights = FolderWeights(model, Path("DeepSeek-R1-FP8"), torch.bfloat16, torch.device("cuda"))
    weights.take("layers.3.mlp.gate.weight", Cut(0, index=1, count=8))       # 32 of 256 experts, nothing else is read

All names and shapes are checked before the first tensor is read, so that a wrong folder fails at once.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmb.config.huggingface.hf_config import HF_ARCHITECTURES, from_hf_config, to_hf_config
from llmb.config.huggingface.mixtures import MIXTURES
from llmb.config.model import Model
from llmb.config.serialization import read_json
from llmb.errors import ConfigError
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.hf_layout import ExpertStackLayout
from llmb.models.hf_weights import (
    HEAD,
    HF_PREFIXES,
    FileTensor,
    hf_names,
    hf_tensors,
    mxfp4_names,
    stored_tensors,
    summarize_names,
    unused_tensors,
)
from llmb.serve.weights.hf_quantized import Folder, OpenFiles, Region, read_dequantized, stored_format, tensor_error
from llmb.serve.weights.weight_source import WeightShard

SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2")
# Calibrated scales of activations and of an fp8 KV cache: here scales are dynamic.
IGNORED_SUFFIXES = ("input_scale", "k_scale", "v_scale")
KINDS = (*IGNORED_SUFFIXES, "rotary_emb.inv_freq", HEAD)  # of ignored tensors
MTP_ARCHITECTURES = {"deepseek"} | {name for name, mixture in MIXTURES.items() if mixture.has_mtp_layers}
# Of config.json: redundant with model_type, or without effect on results unless RoPE is scaled.
IGNORED_FIELDS = ("architectures", "max_position_embeddings")


class HfFolderWeights:
    """Loads the tensors of a model by their names in `llmb/models`; see `llmb/serve/weights/weight_source.py`."""

    def __init__(self, model: Model, folder: Path, dtype: torch.dtype, device: torch.device):
        _check_model(model, folder)
        with torch.device("meta"):
            network: Network = ARCHITECTURES[model.architecture](model)
        self._dtype, self._device = dtype, device
        self._shapes = {name: [*tensor.shape] for name, tensor in network.state_dict().items()}
        self._fp32_names = {name for name, _ in network.named_buffers()}  # buffers stay in fp32
        self._names = hf_names(network)
        self._layouts = type(network).hf_layouts(model)
        self._stored: Folder = stored_tensors(folder)
        tensors = hf_tensors(network)
        self._first_rows = _first_rows(tensors.values())
        self._expected = {name: tensor.shape for name, tensor in tensors.items()}
        ignored = _check_names(folder, model, self._expected, self._stored)
        _check_tensors(folder, self._expected, self._stored)
        self.notes = _notes(ignored)

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        """Return the tensor or a shard on the device; in `dtype`, or in fp32 if it was stored quantized."""
        layout = self._layouts.get(name)
        with OpenFiles() as files:
            if isinstance(layout, ExpertStackLayout):
                return self._read_stack(name, layout, shard, files)
            tensor = self._read(name, _region(self._shapes[name], None if layout else shard), files)
        if layout:  # the rows of a shard are scattered over the file
            tensor = layout.from_hf(tensor)
            tensor = tensor if shard is None else shard.slice(tensor).contiguous()
        return tensor

    def _read_stack(self, name: str, layout: ExpertStackLayout, shard: WeightShard | None, files: OpenFiles) -> Tensor:
        """Read a shard of experts, one by one: two or more of our tensors may be one in the file."""
        assert shard is None or shard.dim == 0, "experts are read whole"
        hf_name, (experts, *within) = self._names[name], _region(self._shapes[name], shard)
        shape = [experts.stop - experts.start, *(rows.stop for rows in within)]
        stack = torch.empty(shape, dtype=self._dtype_of(name, hf_name), device=self._device)
        file_shape = self._expected[hf_name]
        for index, expert in enumerate(range(experts.start, experts.stop)):
            region = (slice(expert, expert + 1), *(slice(0, size) for size in file_shape[1:]))
            file_tensor = read_dequantized(hf_name, region, self._stored, files, self._device)
            stack[index].copy_(layout.from_hf(file_tensor)[0])
        return stack

    def _read(self, name: str, region: Region, files: OpenFiles) -> Tensor:
        hf_name = self._names[name]
        if "{expert}" not in hf_name:
            if first := self._first_rows.get(name, 0):
                region = (slice(region[0].start + first, region[0].stop + first), *region[1:])
            tensor = read_dequantized(hf_name, region, self._stored, files, self._device)
            return tensor.to(
                self._dtype_of(name, hf_name), copy=True
            ).contiguous()  # the tensor is a view of the mapped file
        experts, within = range(region[0].start, region[0].stop), region[1:]
        shape = [rows.stop - rows.start for rows in region]
        stack = torch.empty(shape, dtype=self._dtype_of(name, hf_name.format(expert=0)), device=self._device)
        for index, expert in enumerate(experts):
            expert_name = hf_name.format(expert=expert)
            stack[index].copy_(read_dequantized(expert_name, within, self._stored, files, self._device))
        return stack

    def _dtype_of(self, name: str, hf_name: str) -> torch.dtype:
        quantized = stored_format(hf_name, self._stored) != "unquantized"
        return torch.float32 if quantized or name in self._fp32_names else self._dtype


def _first_rows(tensors: Iterable[FileTensor]) -> dict[str, int]:
    """Return where the rows of our tensors begin in those of files that hold several, by our name."""
    rows = {}
    for tensor in tensors:
        start = 0
        for name, part in zip(tensor.names, tensor.parts, strict=True) if len(tensor.parts) > 1 else ():
            rows[name] = start
            start += len(part)
    return rows


def _region(shape: list[int], shard: WeightShard | None) -> Region:
    whole = [slice(0, size) for size in shape]
    if shard is not None:
        size = shape[shard.dim] // shard.count
        whole[shard.dim] = slice(shard.index * size, (shard.index + 1) * size)
    return tuple(whole)


def _check_model(model: Model, folder: Path) -> None:
    """Check the folder's config.json against the model, if its architecture has one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder of weights")
    if model.architecture not in HF_ARCHITECTURES:
        return
    hf_config: dict[str, Any] = read_json(folder / "config.json")
    # The formats are seen from the tensors.
    if isinstance(hf_config, dict):
        hf_config = {field: value for field, value in hf_config.items() if field != "quantization_config"}
    stored_config, run_config = (
        {field: value for field, value in to_hf_config(spec).items() if field not in IGNORED_FIELDS}
        for spec in (from_hf_config(hf_config, folder.resolve().name), model)
    )
    fields = {**run_config, **stored_config}
    differing = [field for field in fields if stored_config.get(field) != run_config.get(field)]
    if "model_type" in differing:
        differing = ["model_type"]
    if differing:
        details = ", ".join(
            f"{field} {stored_config.get(field)} (the run has {run_config.get(field)})" for field in differing[:4]
        )
        raise ConfigError(f"{folder} holds another model than {model.name}: {details}")


def _check_names(folder: Path, model: Model, expected: Iterable[str], stored: Folder) -> list[str]:
    """Check that no tensor is missing and none is unknown; return the names of those that are ignored."""
    expected = set(expected)
    missing = sorted(name for name in expected - stored.keys() if not set(mxfp4_names(name)) <= stored.keys())
    scales = {f"{name.removesuffix('weight')}{scale}" for name in expected for scale in SCALES}
    scales |= {part for name in expected - stored.keys() for part in mxfp4_names(name)}
    unexpected = sorted(stored.keys() - expected - scales)
    unused = unused_tensors(expected, stored)
    ignored = [
        name for name in unexpected if name in unused or name.endswith(IGNORED_SUFFIXES) or _is_mtp_tensor(name, model)
    ]
    extra = sorted(set(unexpected) - set(ignored))
    errors = [f"lacks {summarize_names(missing, 'tensor')}"] * bool(missing)
    errors += [f"has {summarize_names(extra, 'tensor')} that the model does not"] * bool(extra)
    if errors:
        raise ConfigError(f"{folder} {' and '.join(errors)}")
    return ignored


def _is_mtp_tensor(name: str, model: Model) -> bool:
    """Return whether a tensor belongs to multi-token prediction layers, which follow the last layer or are named so."""
    if model.architecture not in MTP_ARCHITECTURES:
        return False
    match = re.match(rf"{re.escape(HF_PREFIXES.get(model.architecture, 'model.'))}layers\.(\d+)\.", name)
    return name.startswith("model.mtp_") or (match is not None and int(match[1]) >= model.layers)


def _check_tensors(folder: Path, expected: dict[str, list[int]], stored: Folder) -> None:
    errors = [message for name, shape in expected.items() if (message := tensor_error(name, shape, stored))]
    if errors:
        raise ConfigError(f"{folder} has {summarize_names(errors, 'tensor')} of another shape or format")


def _notes(ignored: list[str]) -> tuple[str, ...]:
    """Return a line for each kind of ignored tensors."""
    kinds = Counter(next((kind for kind in KINDS if name.endswith(kind)), "multi-token prediction") for name in ignored)
    return tuple(f"{count} tensors of the folder are not used: {kind}" for kind, count in kinds.items())
