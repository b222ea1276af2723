"""Reader of torch.distributed.checkpoint whose loaded bytes are those that are checked.

    checking = CheckpointCheck(path, rank, world_size)
    dcp.load(tensors, storage_reader=CheckpointReader(path, checking))
    checking.damage()                                # None: what was loaded is what was written

A file that this rank checks is read once, in order, and its tensors go straight to where they are needed. Torch reads
each into new memory first and copies it, which takes longer than the checksum (`bench/checkpoint_load.py`). Files that
other ranks check are read as torch does, only what is needed of them.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from io import BufferedReader, RawIOBase
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from llmb.runtime.checksums.checkpoint_checksums import CheckpointCheck
from llmb.runtime.checksums.file_checksum import Bytes
from llmb.runtime.checksums.file_stream import FileStream

LARGE_BYTES = 1 << 16  # smaller tensors are read with their header
READ_BYTES = 1 << 26  # of tensors that are read together: some need as much memory until they are converted


class CheckpointReader(dcp.FileSystemReader):
    """Reads and checks the files of a part of a checkpoint in one pass."""

    def __init__(self, path: Path, checking: CheckpointCheck):
        super().__init__(path)
        self._folder, self._checking = path, checking

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        streamed: dict[str, list[ReadItem]] = defaultdict(list)
        others: list[ReadItem] = []
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            is_streamed = item.type == LoadItemType.TENSOR and self._checking.is_streamable(name)
            (streamed[name] if is_streamed else others).append(item)
        self._checking.begin(streamed)
        for name, items in streamed.items():
            with self._checking.stream(name) as stream, (self._folder / name).open("rb") as headers:
                self._read_file(stream, headers, items, planner)
        return super().read_data(replace(plan, items=others), planner)

    def _read_file(
        self, stream: FileStream, headers: BufferedReader, items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        """Load tensors in the order in which they are saved; several items may be parts of one."""

        def offset(item: ReadItem) -> int:
            return int(self.storage_data[item.storage_index].offset)

        loads: list[_TensorLoad] = []
        waiting = 0  # bytes
        for _, group in groupby(sorted(items, key=offset), key=offset):
            parts = [(item, planner.resolve_tensor(item).detach()) for item in group]
            load = _TensorLoad(_SavedTensor(headers, self.storage_data[parts[0][0].storage_index]), parts)
            load.begin(stream)
            loads.append(load)
            waiting += load.saved.values_bytes
            if waiting >= READ_BYTES:
                _finish(loads, stream, planner)
                waiting = 0
        _finish(loads, stream, planner)


@dataclass(frozen=True)
class _TensorLoad:
    """A saved tensor, and the items that want it or a part of it."""

    saved: "_SavedTensor"
    parts: list[tuple[ReadItem, Tensor]]

    @property
    def is_direct(self) -> bool:
        """Return whether its bytes go straight to where they are needed."""
        return len(self.parts) == 1 and self.saved.offset is not None and self.saved.is_laid_out_as(self.parts[0][1])

    def begin(self, stream: FileStream) -> None:
        """Say where the stream should copy its values."""
        if self.saved.offset is not None:
            stream.copy_to(self.saved.offset, _bytes(self.parts[0][1]) if self.is_direct else self.saved.storage())

    def finish(self, planner: LoadPlanner) -> None:
        """Pass on its values, which were read."""
        for item, target in self.parts:
            if not self.is_direct:
                target.copy_(_part(self.saved.tensor, item, target))
            planner.commit_tensor(item, target)


def _finish(loads: list[_TensorLoad], stream: FileStream, planner: LoadPlanner) -> None:
    """Read the values of tensors and pass them on."""
    stream.read()
    for load in loads:
        load.finish(planner)
    loads.clear()


class _SavedTensor:
    """A tensor as torch.save wrote it into a file; of a large one all but its values, which lie at `offset`."""

    def __init__(self, file: BufferedReader, item: Any):
        header = _Header(file, item.offset, item.length)
        self.tensor: Tensor = torch.load(cast(BinaryIO, header), map_location="cpu", weights_only=True)
        self.offset = None if header.values is None else item.offset + header.values
        self.values_bytes = header.values_bytes
        if header.values_bytes not in (0, self.tensor.untyped_storage().nbytes()):
            raise OSError(f"the tensor at {item.offset} of {file.name} is not as torch.save writes it")

    def storage(self) -> Bytes:
        """Return the memory of the values that were left out."""
        return _bytes(torch.empty(0, dtype=torch.uint8).set_(self.tensor.untyped_storage()))

    def is_laid_out_as(self, target: Tensor) -> bool:
        """Return whether the file has the bytes of a target as they lie in memory."""
        saved = self.tensor
        is_same = (saved.shape, saved.dtype, saved.device) == (target.shape, target.dtype, target.device)
        is_whole = saved.nbytes == saved.untyped_storage().nbytes()
        return is_same and is_whole and saved.is_contiguous() and target.is_contiguous()


class _Header(RawIOBase):
    """A tensor in a file, for torch.load: instead of reading its values it remembers where they lie."""

    def __init__(self, file: BufferedReader, offset: int, length: int):
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
        self._position = 0
        self.values: int | None = None
        self.values_bytes = 0

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory)[: self._length - self._position]
        if len(view) >= LARGE_BYTES:
            self.values, self.values_bytes, count = self._position, len(view), len(view)
        else:
            self._file.seek(self._offset + self._position)
            count = self._file.readinto(view)
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _bytes(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor."""
    memory: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return memory


def _part(saved: Tensor, item: ReadItem, target: Tensor) -> Tensor:
    """Return the part of a saved tensor that an item asks for."""
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dimension, offset, length)
    if saved.shape != target.shape:  # copying would repeat it
        raise ValueError(f"{item.storage_index.fqn} is {[*saved.shape]} in the file and {[*target.shape]} in the run")
    return saved
