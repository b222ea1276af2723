"""Tiles of attention with logit softcap; `test_compiled_kernels.py` compiles them for each family of GPUs."""

from collections.abc import Callable

import pytest
import torch

from llmb.ops.device_capabilities import DeviceCapabilities
from llmb.ops.softcap import softcap_tiles
from llmb.ops.softcap.softcap_tiles import (
    TILES,
    TILES_SMALL_MEMORY,
    WIDE_TILES,
    WIDE_TILES_SMALL_MEMORY,
    KernelTiles,
    tiles_for,
)

CPU = torch.device("cpu")


def test_tiles_by_head_dim() -> None:
    assert [tiles_for(head_dim, CPU) for head_dim in (16, 128, 256)] == [TILES, TILES, WIDE_TILES]


@pytest.mark.parametrize(
    ("shared_kib", "tiles"),
    [
        (227, (TILES, TILES, WIDE_TILES)),
        (163, (TILES, TILES, WIDE_TILES_SMALL_MEMORY)),
        (99, (TILES, TILES_SMALL_MEMORY, WIDE_TILES_SMALL_MEMORY)),
    ],
)
def test_tiles_by_shared_memory(
    shared_kib: int, tiles: tuple[KernelTiles, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = DeviceCapabilities(compute=(9, 0), shared_memory_bytes=shared_kib << 10)
    monkeypatch.setattr(softcap_tiles, "capabilities", lambda _device: gpu)
    choose: Callable[..., KernelTiles] = tiles_for.__wrapped__  # its cache is of this process's devices
    assert tuple(choose(head_dim, CPU) for head_dim in (64, 128, 256)) == tiles
