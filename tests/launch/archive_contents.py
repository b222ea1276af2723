"""Contents of archives, as bytes, and any text that a run might write."""

import io
import tarfile
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

zstandard = pytest.importorskip("zstandard")

MINUTE = datetime(2026, 1, 2, 3, 4, 5)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
anything = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def decompress(archive: Path) -> bytes:
    """Return all bytes of an archive after decompression, names and manifest included."""
    with archive.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(decompress(archive))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
