"""Reads tensors of published weight files, dequantized, one shard at a time.

| stored tensor | scales | written by |
|---|---|---|
| BF16, F16, F32 | none | everyone |
| F8_E4M3 | NAME_scale_inv, fp32, one for each 128 x 128 | DeepSeek |
| F8_E4M3 | NAME_scale, fp32, one for all or one for each row | ModelOpt |
| U8, two e2m1 numbers a byte | NAME_scale, e4m3, one for each 16; NAME_scale_2, fp32, one for all | ModelOpt (NVFP4) |
| NAME_blocks, U8, two e2m1 numbers a byte | NAME_scales, e8m0, one for each 32 | OpenAI (MXFP4 experts) |

All scales are multiplied with: `scale_inv` is the inverse of the factor a weight was quantized with.

Shapes: O outputs, K inputs.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from llmb.models.hf_weights import StoredTensor, mxfp4_names, open_safetensors
from llmb.ops.quant.activation_quant import GROUP
from llmb.ops.quant.mxfp4 import MXFP4_GROUP, Mxfp4, dequantize_mxfp4
from llmb.ops.quant.nvfp4 import NVFP4_GROUP, Nvfp4, dequantize_nvfp4

UNQUANTIZED = ("BF16", "F16", "F32")
StoredFormat = Literal["unquantized", "fp8_block", "fp8_scaled", "nvfp4", "mxfp4"]
Region = tuple[slice, ...]  # start and stop in each dimension
Folder = dict[str, StoredTensor]


class OpenFiles(ExitStack):
    """Files that are opened on first use and closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, safe_open] = {}

    def read(self, name: str, folder: Folder, region: Region | None = None) -> Tensor:
        """Return a tensor or a region of it as stored; nothing else of the file is read."""
        file, stored_name = folder[name].file, folder[name].name
        if file not in self._open:
            self._open[file] = self.enter_context(open_safetensors(file))
        if region is None:
            return self._open[file].get_tensor(stored_name)
        lazy_slice: Any = self._open[file].get_slice(stored_name)
        tensor: Tensor = lazy_slice[region]
        return tensor


def stored_format(name: str, folder: Folder) -> StoredFormat | None:
    """Return the format by the dtype and the scales; None if it is unknown."""
    if name not in folder:
        return "mxfp4" if all(part in folder and folder[part].dtype == "U8" for part in mxfp4_names(name)) else None
    dtype = folder[name].dtype
    if dtype in UNQUANTIZED:
        return "unquantized"
    if dtype == "F8_E4M3" and f"{name}_scale_inv" in folder:
        return "fp8_block"
    if dtype == "F8_E4M3" and f"{name}_scale" in folder:
        return "fp8_scaled"
    if dtype == "U8" and f"{name}_scale" in folder and f"{name}_scale_2" in folder:
        return "nvfp4"
    return None


def tensor_error(name: str, shape: list[int], folder: Folder) -> str | None:
    """Return what is wrong with a tensor that should have this shape once dequantized, or None."""
    format = stored_format(name, folder)
    if format is None:
        blocks, _ = mxfp4_names(name)
        return f"{name} ({folder[name if name in folder else blocks].dtype} without its scales)"
    expected = {name: [shape]}
    if format == "fp8_block":
        expected[f"{name}_scale_inv"] = [[-(-size // GROUP) for size in shape]]
    elif format == "fp8_scaled":
        expected[f"{name}_scale"] = [[], [1], shape[:1], [shape[0], 1]]
    elif format == "nvfp4":
        expected = {
            name: [[*shape[:-1], shape[-1] // 2]],
            f"{name}_scale": [[*shape[:-1], shape[-1] // NVFP4_GROUP]],
            f"{name}_scale_2": [[], [1]],
        }
    elif format == "mxfp4":
        experts, inputs, outputs = shape  # unquantized stacks are transposed
        groups = [experts, outputs, inputs // MXFP4_GROUP]
        expected = dict(zip(mxfp4_names(name), ([[*groups, MXFP4_GROUP // 2]], [groups]), strict=True))
    for tensor, shapes in expected.items():
        if folder[tensor].shape not in shapes:
            return f"{tensor} {folder[tensor].shape} (the model has {shapes[0]})"
    return None


def read_dequantized(name: str, region: Region, folder: Folder, files: OpenFiles, device: torch.device) -> Tensor:
    """Return a region of a tensor on the device: as stored if it is unquantized, else in fp32."""
    return _READERS[stored_format(name, folder) or "unquantized"](name, region, folder, files, device)


def _read_unquantized(name: str, region: Region, folder: Folder, files: OpenFiles, device: torch.device) -> Tensor:
    return files.read(name, folder, region).to(device)


def _read_fp8_block(name: str, region: Region, folder: Folder, files: OpenFiles, device: torch.device) -> Tensor:
    values_OK = files.read(name, folder, region).to(device).float()
    scale_region = tuple(slice(rows.start // GROUP, -(-rows.stop // GROUP)) for rows in region)
    scales = files.read(f"{name}_scale_inv", folder, scale_region).to(device).float()
    for dim, rows in enumerate(region):
        expanded = scales.repeat_interleave(GROUP, dim=dim)
        scales = expanded.narrow(dim, rows.start % GROUP, rows.stop - rows.start)
    return values_OK * scales


def _read_fp8_scaled(name: str, region: Region, folder: Folder, files: OpenFiles, device: torch.device) -> Tensor:
    values_OK = files.read(name, folder, region).to(device).float()
    scales = files.read(f"{name}_scale", folder).to(device).float().flatten()
    return values_OK * (scales if len(scales) == 1 else scales[region[0], None])


def _read_nvfp4(name: str, region: Region, folder: Folder, files: OpenFiles, device: torch.device) -> Tensor:
    rows, columns = region
    first, last = columns.start // NVFP4_GROUP, -(-columns.stop // NVFP4_GROUP)  # groups are read whole
    half = NVFP4_GROUP // 2
    stored = Nvfp4(
        files.read(name, folder, (rows, slice(first * half, last * half))).to(device),
        files.read(f"{name}_scale", folder, (rows, slice(first, last))).to(device),
        files.read(f"{name}_scale_2", folder).to(device, torch.float32),
    )
    offset = columns.start - first * NVFP4_GROUP
    return dequantize_nvfp4(stored)[:, offset : offset + columns.stop - columns.start]


def _read_mxfp4(name: str, region: Region, folder: Folder, files: OpenFiles, device: torch.device) -> Tensor:
    """Read some experts; their matrices are transposed, as in an unquantized stack."""
    blocks, scales = (
        files.read(part, folder, (region[0], *(slice(0, size) for size in folder[part].shape[1:]))).to(device)
        for part in mxfp4_names(name)
    )
    return dequantize_mxfp4(Mxfp4(blocks.flatten(-2), scales)).mT


_READERS = {
    "unquantized": _read_unquantized,
    "fp8_block": _read_fp8_block,
    "fp8_scaled": _read_fp8_scaled,
    "nvfp4": _read_nvfp4,
    "mxfp4": _read_mxfp4,
}
