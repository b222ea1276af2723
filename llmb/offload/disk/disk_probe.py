"""Rates of a disk as the disk tier uses it: same blocks, same threads, same way past the page cache.

    disk_rates(Path("/nvme/scratch"), DiskSizes(transfer=512 << 20, file=4 << 30, seconds=2.0))["disk_read_gbs"].rate

The file is written before it is read, since blocks that were only reserved are not read from the disk.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from llmb.offload.disk.disk_file import DiskFile
from llmb.offload.pinned_memory import HostSlab
from llmb.runtime.probe.repeated_calls import Measurement, repeat_calls

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class DiskSizes:
    """Bytes of a transfer and of the file, and seconds of each measurement."""

    transfer: int
    file: int
    seconds: float


ON_GPU = DiskSizes(transfer=512 << 20, file=4 << 30, seconds=3.0)  # a bucket of Llama 8B
ON_CPU = DiskSizes(transfer=32 << 20, file=512 << 20, seconds=0.6)  # of a proxy


def disk_rates(folder: Path, sizes: DiskSizes) -> dict[str, Measurement]:
    """Measure bytes read, written, and per direction of both at once, one transfer after the other."""
    file = DiskFile(folder, sizes.file)
    source, target = (HostSlab(sizes.transfer, CPU).memory for _ in range(2))
    source.random_()
    offsets = range(0, sizes.file - sizes.transfer + 1, sizes.transfer)
    for offset in offsets:
        file.write(source, offset)
    reads, writes = cycle(offsets), cycle(reversed(offsets))

    def read() -> None:
        file.read(target, next(reads))

    def write() -> None:
        file.write(source, next(writes))

    with ThreadPoolExecutor(1) as reader:

        def both() -> None:
            reading = reader.submit(read)
            write()
            reading.result()

        ways = {"disk_read_gbs": read, "disk_write_gbs": write, "disk_both_gbs": both}
        return {name: repeat_calls(way, CPU, sizes.seconds, sizes.transfer) for name, way in ways.items()}
