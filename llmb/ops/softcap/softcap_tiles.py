"""Tiles of the kernels of attention with logit softcap, by head_dim and the shared memory of the GPU."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from llmb.ops.device_capabilities import capabilities


@dataclass(frozen=True)
class Tiles:
    """Tile of queries and keys of one kernel, and its warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self, queries: int, keys: int) -> dict[str, Any]:
        """Return launch options; EVEN: all tiles are full, so that nothing is loaded under a mask."""
        even = queries % self.queries == 0 and keys % self.keys == 0
        return {
            "M": self.queries, "N": self.keys, "EVEN": even, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


class KernelTiles(NamedTuple):
    """Tiles of the three kernels."""

    forward: Tiles
    backward_dq: Tiles
    backward_dkv: Tiles


TILES = KernelTiles(Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(32, 64, 4, 3))
# head_dim 128 with 99 KiB of shared memory: a stage of k and v less of dq, which then needs 96 KiB.
TILES_SMALL_MEMORY = TILES._replace(backward_dq=Tiles(128, 64, 8, 2))
# head_dim 256, where a row of a tile is 512 bytes. Shared memory in KiB, of Hopper's 227: forward q 64, two stages of k
# and v 64 each; dq q and dy 128, two stages of 32; dk and dv k and v 64, three stages of q and dy 32 each. Accumulators
# of 128 x 256, or two of 64 x 256, take half of the registers. `tests/ops/compile_kernels.py` compiles all tiles.
WIDE_TILES = KernelTiles(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 3))
WIDE_TILES_SMALL_MEMORY = KernelTiles(Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1))
AMPERE_SHARED_BYTES, HOPPER_SHARED_BYTES = 163 << 10, 227 << 10  # of the A100, which the RTX 3090 does not have


@cache
def tiles_for(head_dim: int, device: torch.device) -> KernelTiles:
    """Return the tiles for heads of this width."""
    shared = capabilities(device).shared_memory_bytes
    if head_dim <= 128:
        return TILES if head_dim <= 64 or shared is None or shared >= AMPERE_SHARED_BYTES else TILES_SMALL_MEMORY
    return WIDE_TILES if shared is None or shared >= HOPPER_SHARED_BYTES else WIDE_TILES_SMALL_MEMORY
