"""llmb-install verify: checksums beside a folder of weights."""

import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from weight_problems import SHARD, problems_of, verify

from llmb.formats.weight_folder import check_folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(folder: Path, style: str) -> None:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if style == "SHA256SUMS":
        lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
        (folder / style).write_text("".join(lines))
    elif style == "one of each":
        for name in names:
            (folder / f"{name}.sha256").write_text(sha256(folder / name).upper() + "\n")
    else:
        (folder / "all.sha256").write_text("".join(f"{sha256(folder / name)} *./{name}\n" for name in names))


@pytest.mark.parametrize("style", ["SHA256SUMS", "one of each", "binary"])
def test_checksums(style, folder, capsys):
    write_sums(folder, style)
    code, lines = verify(capsys, folder)
    assert code == 0
    assert "checksum" in lines[1]
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)
    code, lines = verify(capsys, folder)
    assert code == 1
    assert len(lines) == 4
    assert lines[0].startswith(f"corrupted   {SHARD}: has another checksum than ")


def test_checksums_of_missing_or_outside_files(folder):
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  tokenizer.json\n{'0' * 64}  ../secret\nnonsense\n# a remark\n\n")
    assert problems_of(check_folder(folder)) == [
        ("corrupted", "SHA256SUMS"),
        ("corrupted", "SHA256SUMS"),
        ("missing", "tokenizer.json"),
    ]


def write_blake3(folder: Path, digest: Callable[[bytes], str]) -> None:
    lines = [f"{digest(path.read_bytes())}  {path.name}\n" for path in sorted(folder.glob("*.safetensors"))]
    (folder / "checksums.blake3").write_text("".join(lines))


def test_unavailable_blake3_is_reported(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    monkeypatch.setattr("llmb.formats.checksums.find_spec", lambda _name: None)
    write_blake3(folder, lambda _data: "0" * 64)
    code, lines = verify(capsys, folder)
    assert code == 0
    assert "not checked: checksums.blake3 (3 files): pip install blake3" in lines
    assert not any("checksums of" in line for line in lines)


def test_blake3_if_installed(folder, monkeypatch):
    """A module of that name with the interface of the package; the arithmetic itself is not ours."""
    monkeypatch.setitem(sys.modules, "blake3", types.SimpleNamespace(blake3=hashlib.sha256))
    monkeypatch.setattr("llmb.formats.checksums.find_spec", lambda _name: object())
    write_blake3(folder, lambda data: hashlib.sha256(data).hexdigest())
    report = check_folder(folder)
    assert (report.problems, report.not_checked) == ([], [])
    assert report.checked[-1] == "3 checksums of checksums.blake3"
    write_blake3(folder, lambda _data: "0" * 64)
    assert problems_of(check_folder(folder)) == [("corrupted", f"model-{n:05}-of-00003.safetensors") for n in (1, 2, 3)]
