"""The checked reader loads what torch's reader loads, whatever the tensors are loaded into, and finds every change."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from llmb.runtime.checkpoint_folder import checkpoint_path, commit, create_partial
from llmb.runtime.checksums.checkpoint_checksums import CheckpointCheck, checksums
from llmb.runtime.checksums.file_checksum import ALGORITHM, BlockHashes
from llmb.runtime.checksums.file_stream import FileStream
from llmb.train.checkpoint_reader import CheckpointReader
from llmb.train.checkpoint_writer import CheckpointWriter
from llmb.train.chunked_tensor import ChunkedTensor

BUFFER_BYTES = BlockHashes.buffer_bytes
SAVED = {
    "whole": torch.arange(BUFFER_BYTES // 4 * 6, dtype=torch.float32).reshape(64, -1),
    "scalar": torch.tensor(7.0),
    "small": torch.arange(9.0),
    "bf16": torch.arange(40_000, dtype=torch.float32).bfloat16().reshape(200, 200),
    "transposed": torch.arange(60_000.0).reshape(300, 200).t(),
    "loaded transposed": torch.arange(90_000.0).reshape(300, 300),
    "of another dtype": torch.arange(50_000.0),
    "in chunks": torch.arange(120_000.0).reshape(400, 300),
    "empty": torch.empty(0, 3),
}
CHUNKS = ((300, 0), (100, 0))  # what another layout has of it


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    final = checkpoint_path(tmp_path, 2)
    partial = create_partial(final)
    dcp.save(dict(SAVED), storage_writer=CheckpointWriter(partial))
    commit(final, {}, 1, checksums(partial.iterdir()))
    return final


def targets() -> dict[str, Tensor]:
    """Memory to load into: some of it is laid out otherwise than the file."""
    return {name: torch.full_like(tensor, -1.0) for name, tensor in SAVED.items()} | {
        "loaded transposed": torch.full((300, 300), -1.0).t(),
        "of another dtype": torch.full((50_000,), -1.0, dtype=torch.bfloat16),
        "in chunks": ChunkedTensor((400, 300), torch.float32, [(offset, torch.zeros(100, 300)) for offset in CHUNKS]),
    }


def load(checkpoint: Path) -> tuple[dict[str, Tensor], str | None]:
    """Load as far as possible: torch may fail on a changed header. Files are checked to their end all the same."""
    loaded, checking = targets(), CheckpointCheck(checkpoint)
    with suppress(Exception, dcp.CheckpointException):
        dcp.load(loaded, storage_reader=CheckpointReader(checkpoint, checking))
    return loaded, checking.damage()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_are_those_that_were_saved(checkpoint: Path) -> None:
    loaded, damage = load(checkpoint)
    assert damage is None
    for (row, _), values in loaded.pop("in chunks").chunks:
        assert torch.equal(values, SAVED["in chunks"][row : row + 100])
    for name, tensor in loaded.items():
        assert torch.equal(tensor, SAVED[name].to(tensor.dtype)), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_changed_byte_of_what_was_loaded_is_found(checkpoint: Path) -> None:
    (shard,) = checkpoint.glob("*.distcp")
    whole = shard.read_bytes()
    for offset in (0, len(whole) - 1, *random.Random(5).sample(range(len(whole)), 6)):
        shard.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :])
        _, damage = load(checkpoint)
        assert damage == f"{shard.name} is not what was written: its checksum differs", offset


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("remains", [None, 0, 100, BUFFER_BYTES * 3 + 5])
def test_missing_bytes_are_named(checkpoint: Path, remains: int | None) -> None:
    (shard,) = checkpoint.glob("*.distcp")
    written = shard.stat().st_size
    if remains is None:
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:remains])
    _, damage = load(checkpoint)
    reason = "cannot be read: No such file or directory"
    if remains is not None:
        reason = f"has {remains:,} bytes, {written:,} were written"
    assert damage == f"{shard.name} {reason}"


def test_files_are_divided_by_rank(tmp_path: Path) -> None:
    """Each rank checks the file that it wrote, and only that: of a resume in the same layout, the one that it loads."""
    final = checkpoint_path(tmp_path, 2)
    partial = create_partial(final)
    for rank in range(12):
        (partial / f"__{rank}_0.distcp").write_bytes(bytes([rank]))
    (partial / ".metadata").write_bytes(b"metadata")
    commit(final, {}, 1, checksums(partial.iterdir()))
    for rank in range(12):
        checking = CheckpointCheck(final, rank, 12)
        checked = [path.name for path in final.iterdir() if checking.is_streamable(path.name)]
        assert sorted(checked) == sorted([f"__{rank}_0.distcp", *([".metadata"] if rank == 0 else [])])
        with checking.stream(f"__{rank}_0.distcp"):
            pass  # nothing of it is needed: it is read to its end all the same
        assert checking.damage() is None


def test_stream_goes_forward_only(tmp_path: Path) -> None:
    path, content = tmp_path / "file", random.Random(1).randbytes(2 * BUFFER_BYTES + 107)
    path.write_bytes(content)
    memory, following = torch.zeros(2, 100, dtype=torch.uint8).numpy()
    with FileStream(path, ALGORITHM) as stream:
        stream.copy_to(BUFFER_BYTES - 50, memory)
        stream.read()
        assert memory.tobytes() == content[BUFFER_BYTES - 50 : BUFFER_BYTES + 50]
        stream.copy_to(2 * BUFFER_BYTES - 50, following)
        stream.read()
        assert following.tobytes() == content[2 * BUFFER_BYTES - 50 : 2 * BUFFER_BYTES + 50]
        with pytest.raises(ValueError, match="bytes at 0 were read before"):
            stream.copy_to(0, memory)
        with pytest.raises(OSError, match="ends at byte"):
            stream.copy_to(len(content) - 50, memory)
