"""Checksums of files find every small change, a missing end, and blocks that changed places."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmb.config.spec import Training
from llmb.errors import ConfigError
from llmb.runtime.checkpoint_folder import checkpoint_path, commit, create_partial, resume_point
from llmb.runtime.checksums import file_checksum as file_checksum_module
from llmb.runtime.checksums import file_stream
from llmb.runtime.checksums.checkpoint_checksums import CheckpointCheck, checksums, find_damage
from llmb.runtime.checksums.file_checksum import ALGORITHM, HASHED_BYTES, BlockHashes
from llmb.runtime.checksums.file_stream import file_checksum

SECTOR_BYTES = 512


@pytest.fixture
def content() -> bytes:
    """More than a buffer, and no whole number of words."""
    return random.Random(1).randbytes(2_298_885)


def digest_of(path: Path, content: bytes) -> int:
    path.write_bytes(content)
    return file_checksum(path, ALGORITHM).digest


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path, whole = tmp_path / "file", random.Random(2).randbytes(203)
    digests = {digest_of(path, whole)}
    for offset in range(len(whole)):
        digests.add(digest_of(path, whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :]))
    assert len(digests) == 1 + len(whole)


def test_flipped_bytes_of_a_large_file_are_found(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    changed = {len(content) - 1, HASHED_BYTES - 1, HASHED_BYTES, *random.Random(3).sample(range(len(content)), 17)}
    digests = {digest_of(path, content)}
    for offset in changed:
        flipped = bytearray(content)
        flipped[offset] ^= 0x80
        digests.add(digest_of(path, flipped))
    assert len(digests) == 1 + len(changed)


@pytest.mark.parametrize("size", [8, SECTOR_BYTES, 4096, 65536, 1 << 20, HASHED_BYTES])
@pytest.mark.parametrize("distance", [1, 2, 7])
def test_blocks_that_changed_places_are_found(tmp_path: Path, content: bytes, size: int, distance: int) -> None:
    path = tmp_path / "file"
    other = min(distance * size, len(content) - size)
    swapped = bytearray(content)
    swapped[:size], swapped[other : other + size] = content[other : other + size], content[:size]
    assert digest_of(path, swapped) != digest_of(path, content)


def test_any_two_sectors_of_a_block_that_changed_places_are_found(tmp_path: Path) -> None:
    path, count = tmp_path / "file", HASHED_BYTES // SECTOR_BYTES
    block = random.Random(5).randbytes(HASHED_BYTES)
    whole = digest_of(path, block)
    first = block[:SECTOR_BYTES]
    for offset in range(SECTOR_BYTES, HASHED_BYTES, SECTOR_BYTES * (count // 128)):
        second = block[offset : offset + SECTOR_BYTES]
        swapped = second + block[SECTOR_BYTES:offset] + first + block[offset + SECTOR_BYTES :]
        assert digest_of(path, swapped) != whole, f"sector {offset // SECTOR_BYTES}"


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_words_of_one_bit_that_changed_blocks_are_found(tmp_path: Path, bit: int) -> None:
    digests = set()
    for block in range(8):
        words = np.zeros(8 * HASHED_BYTES // 8, dtype="<u8")
        words[block * HASHED_BYTES // 8] = 1 << bit
        digests.add(digest_of(tmp_path / "file", words.tobytes()))
    assert len(digests) == 8


def test_missing_or_added_zeros_are_found(tmp_path: Path) -> None:
    path, zeros = tmp_path / "file", bytes(HASHED_BYTES)
    sizes = (0, 1, 8, 9, HASHED_BYTES - 1, HASHED_BYTES)
    assert len({digest_of(path, zeros[:size]) for size in sizes}) == len(sizes)


def test_checksum_does_not_depend_on_how_a_file_is_read(tmp_path: Path, content: bytes, monkeypatch) -> None:
    """The system may read fewer bytes than it is asked for."""
    path = tmp_path / "file"
    whole, read = digest_of(path, content), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: read(file, [views[0][:99_991]], offset))
    assert file_checksum(path, ALGORITHM) == (len(content), whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_checksum_does_not_depend_on_threads(tmp_path: Path, monkeypatch, threads: int) -> None:
    path, whole = tmp_path / "file", random.Random(4).randbytes(2 * HASHED_BYTES * 3 + 5)
    path.write_bytes(whole)
    monkeypatch.setattr(file_stream, "BLOCKS_AT_ONCE", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(threads))
    hashes = BlockHashes()
    for start in range(0, len(whole), HASHED_BYTES):
        block = whole[start : start + HASHED_BYTES]
        buffer = np.frombuffer(block.ljust(HASHED_BYTES, b"\1"), dtype=np.uint8).copy()
        hashes.add(hashes.partial_result(buffer, len(block)))
    assert file_checksum(path, ALGORITHM) == hashes.result()


DIGESTS = [
    ("crc32", 0xBD0C92D4),
    ("word_sums", 0x9243AD03C105F195),
    ("interleaved_sums", 0xCD24884D9A9D5846),
    ("xxh3_blocks", 0xD11004CF31452846),
]


@pytest.mark.parametrize(("algorithm", "digest"), DIGESTS)
def test_checkpoint_of_any_version_is_checked(tmp_path: Path, content: bytes, algorithm: str, digest: int) -> None:
    final = checkpoint_path(tmp_path, 2)
    file = create_partial(final) / "shard"
    file.write_bytes(content)
    commit(final, {}, 1, {"shard": {"bytes": len(content), algorithm: digest}})
    assert find_damage(final) is None
    (final / "shard").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert find_damage(final) == "shard is not what was written: its checksum differs"


def test_without_xxhash_checkpoints_have_sums_and_hashes_are_refused_by_name(tmp_path: Path, monkeypatch) -> None:
    code = "from llmb.runtime.checksums.file_checksum import ALGORITHM; print(ALGORITHM)"
    without_xxhash = f"import sys; sys.modules['xxhash'] = None; {code}"
    algorithms = [
        subprocess.check_output([sys.executable, "-c", program], text=True).strip()
        for program in (code, without_xxhash)
    ]
    assert algorithms == ["xxh3_blocks", "interleaved_sums"]
    final = checkpoint_path(tmp_path, 2)
    (create_partial(final) / "shard").write_bytes(b"abc")
    commit(final, {}, 1, checksums([final.with_name("step_2.partial") / "shard"]))
    monkeypatch.setattr(file_checksum_module, "xxhash", None)
    with pytest.raises(ConfigError, match="XXH3 checksums: pip install xxhash"):
        find_damage(final)


@pytest.mark.parametrize("recorded", [{}, None, {"bytes": 3}, {"bytes": None, ALGORITHM: 1}, {"crc32": 1}])
def test_file_without_a_checksum_is_damage(tmp_path: Path, recorded: object) -> None:
    final = checkpoint_path(tmp_path, 2)
    (create_partial(final) / "shard").write_bytes(b"abc")
    commit(final, {}, 1, {"shard": recorded})
    assert find_damage(final) == "shard has no checksum in checkpoint.json"


def test_checkpoint_is_never_written_through_a_planted_link(tmp_path: Path) -> None:
    final, private = checkpoint_path(tmp_path, 2), tmp_path / "private"
    private.mkdir()
    (private / "checkpoint.json").write_text("mine")
    final.parent.mkdir()
    final.with_name("step_2.partial").symlink_to(private)
    partial = create_partial(final)
    (partial / "checkpoint.json").symlink_to(private / "checkpoint.json")
    commit(final, {}, 1, {})
    assert (private / "checkpoint.json").read_text() == "mine"
    assert find_damage(final) is None


def test_checksums_are_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    assert checksums([tmp_path / "a"]) == {
        "a": {"bytes": 1, ALGORITHM: file_checksum(tmp_path / "a", ALGORITHM).digest}
    }


def two_checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    for step in (2, 4):
        final = checkpoint_path(tmp_path, step)
        file = create_partial(final) / "shard"
        file.write_bytes(b"abc")
        commit(final, {}, 1, checksums([file]))
    return checkpoint_path(tmp_path, 2), checkpoint_path(tmp_path, 4)


def test_file_that_became_a_fifo_is_damage_and_not_waited_for(tmp_path: Path) -> None:
    older, newer = two_checkpoints(tmp_path)
    (newer / "shard").unlink()
    os.mkfifo(newer / "shard")
    with pytest.raises(ConfigError, match=f"shard is not a regular file; resume={older} continues from an older one"):
        CheckpointCheck(newer)


def test_damaged_identity_offers_an_older_checkpoint(tmp_path: Path) -> None:
    older, newer = two_checkpoints(tmp_path)
    identity = newer / "checkpoint.json"
    identity.write_text(identity.read_text().replace("3", "4", 1))
    work = Training(seqlen=8, mbs=1, gbs=1, ga=1, resume=str(tmp_path))
    with pytest.raises(ConfigError, match=f"its checksum differs; resume={older} continues from an older one"):
        resume_point(work, tmp_path, {}, {}, 1)
