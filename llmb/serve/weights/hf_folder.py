"""Weights from a folder in Hugging Face's layout, in any of the published number formats.

    weights = FolderWeights(model, Path("DeepSeek-R1-FP8"), torch.bfloat16, torch.device("cuda"))
    weights.take("layers.3.mlp.gate.weight", Cut(0, index=1, parts=8))       # 32 of 256 experts, nothing else is read

All names and shapes are checked before the first tensor is read, so that a wrong folder costs no time.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmb.config.serialization import read_json
from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.hf_config import CONFIGURED, from_config, to_config
from llmb.models.hf_weights import TRUNKS, foreign_names, foreign_tensors, listed, stored_tensors
from llmb.serve.weights.hf_quantized import Folder, Region, Shards, fault, read_plain, stored_format
from llmb.serve.weights.weight_source import Cut

SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2")
# What calibration found for activations and for a cache in 8 bits: here scales come from the numbers themselves.
UNUSED = ("input_scale", "k_scale", "v_scale", "rotary_emb.inv_freq")
# Of config.json: another word for model_type, and what changes no number where positions are not stretched.
NEEDLESS = ("architectures", "max_position_embeddings")


class FolderWeights:
    """Gives each tensor of a model by its name in `llmb/models`; see `llmb/serve/weights/weight_source.py`."""

    def __init__(self, model: Model, folder: Path, dtype: torch.dtype, device: torch.device):
        _check_model(model, folder)
        with torch.device("meta"):
            network: Network = ARCHITECTURES[model.architecture](model)
        self._dtype, self._device = dtype, device
        self._shapes = {name: [*tensor.shape] for name, tensor in network.state_dict().items()}
        self._exact = {name for name, _ in network.named_buffers()}  # what a model must not lose digits of
        self._names = foreign_names(network)
        self._orders = type(network).foreign_orders(model)
        self._stored: Folder = stored_tensors(folder)
        wanted = {name: [*tensor.shape] for name, tensor in foreign_tensors(network).items()}
        ignored = _check_names(folder, model, wanted, self._stored)
        _check_tensors(folder, wanted, self._stored)
        self.notes = _notes(ignored)

    def take(self, name: str, cut: Cut | None = None) -> Tensor:
        """The tensor, or this rank's share, on the device; in `dtype`, or in fp32 where it was stored in fewer bits."""
        order = self._orders.get(name)
        with Shards() as shards:
            region = _region(self._shapes[name], None if order else cut)
            found = self._read(name, region, shards)
        if order:  # rows of a share lie far apart in the file
            found = order.from_file(found)
            found = found if cut is None else cut.of(found).contiguous()
        return found

    def _read(self, name: str, region: Region, shards: Shards) -> Tensor:
        foreign = self._names[name]
        if "{expert}" not in foreign:
            found = read_plain(foreign, region, self._stored, shards, self._device)
            return found.to(self._format(name, foreign), copy=True).contiguous()  # what is read lies in the file
        experts, within = range(region[0].start, region[0].stop), region[1:]
        shape = [one.stop - one.start for one in region]
        stack = torch.empty(shape, dtype=self._format(name, foreign.format(expert=0)), device=self._device)
        for place, expert in enumerate(experts):
            one = foreign.format(expert=expert)
            stack[place].copy_(read_plain(one, within, self._stored, shards, self._device))
        return stack

    def _format(self, name: str, foreign: str) -> torch.dtype:
        narrow = stored_format(foreign, self._stored) != "wide"
        return torch.float32 if narrow or name in self._exact else self._dtype


def _region(shape: list[int], cut: Cut | None) -> Region:
    whole = [slice(0, size) for size in shape]
    if cut is not None:
        size = shape[cut.dim] // cut.parts
        whole[cut.dim] = slice(cut.index * size, (cut.index + 1) * size)
    return tuple(whole)


def _check_model(model: Model, folder: Path) -> None:
    """The folder's config.json tells the same model, where an architecture has one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder of weights")
    if model.architecture not in CONFIGURED:
        return
    said: dict[str, Any] = read_json(folder / "config.json")
    # Which tensors are in fewer bits is seen from the tensors, so what config.json says of it is not needed.
    if isinstance(said, dict):
        said = {field: value for field, value in said.items() if field != "quantization_config"}
    theirs, ours = (
        {field: value for field, value in to_config(one).items() if field not in NEEDLESS}
        for one in (from_config(said, folder.resolve().name), model)
    )
    differing = [field for field in {**ours, **theirs} if theirs.get(field) != ours.get(field)]
    if "model_type" in differing:
        differing = ["model_type"]
    if differing:
        told = ", ".join(f"{field} {theirs.get(field)} (the run has {ours.get(field)})" for field in differing[:4])
        raise ConfigError(f"{folder} holds another model than {model.name}: {told}")


def _check_names(folder: Path, model: Model, wanted: Iterable[str], stored: Folder) -> list[str]:
    """Every tensor is there and every one that is there is known; gives those that are not used."""
    wanted = set(wanted)
    missing = sorted(wanted - stored.keys())
    scales = {f"{name.removesuffix('weight')}{scale}" for name in wanted for scale in SCALES}
    others = sorted(stored.keys() - wanted - scales)
    ignored = [name for name in others if name.endswith(UNUSED) or _predicts_ahead(name, model)]
    extra = sorted(set(others) - set(ignored))
    wrong = [f"lacks {listed(missing, 'tensor')}"] * bool(missing)
    wrong += [f"has {listed(extra, 'tensor')} that the model does not"] * bool(extra)
    if wrong:
        raise ConfigError(f"{folder} {' and '.join(wrong)}")
    return ignored


def _predicts_ahead(name: str, model: Model) -> bool:
    """Whether it belongs to DeepSeek's layers for multi-token prediction, which follow the last one of the model."""
    found = re.match(rf"{re.escape(TRUNKS.get(model.architecture, 'model.'))}layers\.(\d+)\.", name)
    return model.architecture == "deepseek" and found is not None and int(found[1]) >= model.layers


def _check_tensors(folder: Path, wanted: dict[str, list[int]], stored: Folder) -> None:
    faults = [said for name, shape in wanted.items() if (said := fault(name, shape, stored))]
    if faults:
        raise ConfigError(f"{folder} has {listed(faults, 'tensor')} of another shape or format")


def _notes(ignored: list[str]) -> tuple[str, ...]:
    """What was left aside, by kind."""
    kinds = Counter(
        next((kind for kind in UNUSED if name.endswith(kind)), "multi-token prediction") for name in ignored
    )
    return tuple(f"{count} tensors of the folder are not used: {kind}" for kind, count in kinds.items())
