"""The number formats of published weight files, read as plain numbers, a rank's part at a time.

| stored tensor | scales beside it | written by |
|---|---|---|
| BF16, F16, F32 | none | everyone |
| F8_E4M3 | NAME_scale_inv, fp32, one for each 128 x 128 | DeepSeek |
| F8_E4M3 | NAME_scale, fp32, one for all or one for each row | ModelOpt |
| U8, two e2m1 numbers a byte | NAME_scale, e4m3, one for each 16; NAME_scale_2, fp32, one for all | ModelOpt (NVFP4) |

All scales are multiplied with: `scale_inv` is the inverse of what a weight was multiplied with when it was rounded.

Shapes: O outputs, K inputs.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from llmb.models.hf_weights import Stored, opened
from llmb.ops.quant.activation_quant import GROUP
from llmb.ops.quant.nvfp4 import NVFP4_GROUP, Nvfp4, from_nvfp4

WIDE = ("BF16", "F16", "F32")
StoredFormat = Literal["wide", "blocks8", "scaled8", "nvfp4"]
Region = tuple[slice, ...]  # with a start and a stop in each dimension
Folder = dict[str, Stored]


class Shards(ExitStack):
    """Files that are opened when first read, and closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, safe_open] = {}

    def part(self, name: str, folder: Folder, region: Region | None = None) -> Tensor:
        """A tensor as it is stored, or a part of it; nothing else of the file is read."""
        file = folder[name].file
        if file not in self._open:
            self._open[file] = self.enter_context(opened(file))
        if region is None:
            return self._open[file].get_tensor(name)
        found: Any = self._open[file].get_slice(name)
        part: Tensor = found[region]
        return part


def stored_format(name: str, folder: Folder) -> StoredFormat | None:
    """By what it is and which scales lie beside it; None: nothing that is known here."""
    dtype = folder[name].dtype
    if dtype in WIDE:
        return "wide"
    if dtype == "F8_E4M3" and f"{name}_scale_inv" in folder:
        return "blocks8"
    if dtype == "F8_E4M3" and f"{name}_scale" in folder:
        return "scaled8"
    if dtype == "U8" and f"{name}_scale" in folder and f"{name}_scale_2" in folder:
        return "nvfp4"
    return None


def fault(name: str, shape: list[int], folder: Folder) -> str | None:
    """What is wrong with a tensor that should hold numbers of this shape, or None."""
    stored, form = folder[name], stored_format(name, folder)
    if form is None:
        return f"{name} ({stored.dtype} without its scales)"
    wanted = {name: [shape]}
    if form == "blocks8":
        wanted[f"{name}_scale_inv"] = [[-(-size // GROUP) for size in shape]]
    elif form == "scaled8":
        wanted[f"{name}_scale"] = [[], [1], shape[:1], [shape[0], 1]]
    elif form == "nvfp4":
        wanted = {
            name: [[*shape[:-1], shape[-1] // 2]],
            f"{name}_scale": [[*shape[:-1], shape[-1] // NVFP4_GROUP]],
            f"{name}_scale_2": [[], [1]],
        }
    for tensor, shapes in wanted.items():
        if folder[tensor].shape not in shapes:
            return f"{tensor} {folder[tensor].shape} (the model has {shapes[0]})"
    return None


def read_plain(name: str, region: Region, folder: Folder, shards: Shards, device: torch.device) -> Tensor:
    """A part of a tensor on the device: as stored where that is wide enough, else in fp32."""
    return _READERS[stored_format(name, folder) or "wide"](name, region, folder, shards, device)


def _wide(name: str, region: Region, folder: Folder, shards: Shards, device: torch.device) -> Tensor:
    return shards.part(name, folder, region).to(device)


def _blocks8(name: str, region: Region, folder: Folder, shards: Shards, device: torch.device) -> Tensor:
    values_OK = shards.part(name, folder, region).to(device).float()
    touched = tuple(slice(one.start // GROUP, -(-one.stop // GROUP)) for one in region)
    scales = shards.part(f"{name}_scale_inv", folder, touched).to(device).float()
    for dim, one in enumerate(region):
        spread = scales.repeat_interleave(GROUP, dim=dim)
        scales = spread.narrow(dim, one.start % GROUP, one.stop - one.start)
    return values_OK * scales


def _scaled8(name: str, region: Region, folder: Folder, shards: Shards, device: torch.device) -> Tensor:
    values_OK = shards.part(name, folder, region).to(device).float()
    scales = shards.part(f"{name}_scale", folder).to(device).float().flatten()
    return values_OK * (scales if len(scales) == 1 else scales[region[0], None])


def _nvfp4(name: str, region: Region, folder: Folder, shards: Shards, device: torch.device) -> Tensor:
    rows, columns = region
    first, last = columns.start // NVFP4_GROUP, -(-columns.stop // NVFP4_GROUP)  # groups are read whole
    half = NVFP4_GROUP // 2
    stored = Nvfp4(
        shards.part(name, folder, (rows, slice(first * half, last * half))).to(device),
        shards.part(f"{name}_scale", folder, (rows, slice(first, last))).to(device),
        shards.part(f"{name}_scale_2", folder).to(device, torch.float32),
    )
    begin = columns.start - first * NVFP4_GROUP
    return from_nvfp4(stored)[:, begin : begin + columns.stop - columns.start]


_READERS = {"wide": _wide, "blocks8": _blocks8, "scaled8": _scaled8, "nvfp4": _nvfp4}
