"""A checkpoint in several files loads as one does, and an error of any thread that writes reaches the caller."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from llmb.runtime.checkpoint_folder import checkpoint_path, commit, create_partial, root_cause
from llmb.runtime.checksums.checkpoint_checksums import CheckpointCheck, checksums
from llmb.train.checkpoint_reader import CheckpointReader
from llmb.train.checkpoint_writer import CheckpointWriter

SAVED = {f"weight {n}": torch.arange(n * 7_000.0) for n in range(9)} | {"step": torch.tensor(3.0)}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(6))


def test_tensors_of_several_files_are_loaded_and_checked(tmp_path: Path) -> None:
    final = checkpoint_path(tmp_path, 2)
    partial = create_partial(final)
    dcp.save(dict(SAVED), storage_writer=CheckpointWriter(partial))
    commit(final, {}, 1, checksums(partial.iterdir()))
    shards = sorted(path.name for path in final.glob("*.distcp"))
    assert shards == ["__0_0_0.distcp", "__0_1_0.distcp", "__0_2_0.distcp"]
    loaded, checking = {name: torch.full_like(tensor, -1.0) for name, tensor in SAVED.items()}, CheckpointCheck(final)
    dcp.load(loaded, storage_reader=CheckpointReader(final, checking))
    assert checking.damage() is None
    assert all(torch.equal(loaded[name], tensor) for name, tensor in SAVED.items())
    assert all(CheckpointCheck(final, 0, 2).is_streamable(name) for name in shards), "each rank checks what it wrote"


def test_full_disk_of_any_thread_is_an_error(tmp_path: Path) -> None:
    class FullDisk(CheckpointWriter):
        def __init__(self, path: Path):
            super().__init__(path)
            create = self.fs.create_stream

            def create_stream(path: Path, mode: str):
                if Path(path).name == "__0_2_0.distcp":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                return create(path, mode)

            self.fs.create_stream = create_stream  # type: ignore[method-assign,assignment]

    with pytest.raises(dcp.CheckpointException) as error:
        dcp.save(dict(SAVED), storage_writer=FullDisk(create_partial(checkpoint_path(tmp_path, 2))))
    assert root_cause(error.value.failures[0][0]) == "No space left on device"
