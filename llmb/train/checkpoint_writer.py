"""Writer of torch.distributed.checkpoint whose threads write a file each, and whose errors reach the caller.

    dcp.save(tensors, storage_writer=CheckpointWriter(folder))

Torch's own threads lose their errors, such as that of a full disk, so each of ours calls torch with one. The CRC-32 of
each tensor, which takes torch longer than the write and which nobody reads, is left out: files have a checksum.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

THREADS = 4  # at most, and half of the cores: training goes on meanwhile


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes the tensors of a rank to a few files at once."""

    def __init__(self, path: Path):
        super().__init__(path, per_thread_copy_ahead=0)  # tensors are on the host already

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) // 2))
        items = sorted(plan.items, key=_bytes, reverse=True)
        write = super().write_data
        without_crc32 = serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with without_crc32, ThreadPoolExecutor(threads) as workers:
            futures = [
                workers.submit(write, _part(plan, items[n::threads], n), planner)
                for n in range(min(threads, len(items)))
            ]
            results = [result for future in futures for result in future.result().value()]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _part(plan: SavePlan, items: list[WriteItem], number: int) -> SavePlan:
    """Return a plan of some of the items, for files of other names: `__<rank>_<number>_0.distcp`."""
    prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
    return replace(plan, items=items, storage_data=prefix)


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize
