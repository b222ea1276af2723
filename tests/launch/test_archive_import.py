"""Imports of archives: the same files as were packed, and nothing harmful or damaged is unpacked."""

import io
import json
import os
import re
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from archive_contents import anything, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmb.errors import ConfigError
from llmb.launch.archive import checksummed_file, unpack
from llmb.launch.archive.checksummed_file import CHECKSUM_BYTES, append_checksum, compressed_writer
from llmb.launch.archive.import_runs import import_archive
from llmb.launch.archive.manifest import ROOT
from llmb.launch.archive.pack import write_archive
from llmb.launch.archive.run_origin import read_origin
from llmb.launch.archive.unpack import read_archive


@pytest.mark.slow
@given(count=st.integers(1, 3), text=anything, executable=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_archive_import_archive_roundtrip(make_run, count, text, executable):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [make_run(folder / "source", second, job_id=f"L{second}") for second in range(count)]
        extra = runs[0].path / "deep" / "notes.txt"
        extra.parent.mkdir()
        extra.write_text(text, encoding="utf-8")
        extra.chmod(0o755 if executable else 0o600)
        first = write_archive(runs, folder / "a.tar.zst", {})
        result = import_archive(first.output, folder / "target")
        assert (len(result.new), result.existing) == (count, [])
        second = write_archive(result.new, folder / "b.tar.zst", {})
        assert read_archive(second.output, None).manifest == read_archive(first.output, None).manifest
        assert second.output.read_bytes() == first.output.read_bytes()


def test_import_is_idempotent(run, tmp_path):
    archive = write_archive([run], tmp_path / "a.tar.zst", {}).output
    target = tmp_path / "target"
    (new,) = import_archive(archive, target).new
    assert read_origin(new).cluster == "node1"
    assert read_origin(new).job_id == "L1@node1"
    before = tree(target)
    result = import_archive(archive, target, "another")
    assert (result.new, result.existing) == ([], [new])
    assert tree(target) == before
    result = import_archive(archive, tmp_path / "install")  # its origin
    assert (result.new, result.existing) == ([], [run])
    assert read_origin(run) is None


def test_runs_of_the_same_name_and_second_get_numbered_folders(make_run, tmp_path):
    target = tmp_path / "target"
    local = make_run(target, host="mine")
    before = tree(local.path)
    archives = []
    for host in ("a", "b"):
        run = make_run(tmp_path / host, host=host)
        archives.append(write_archive([run], tmp_path / f"{host}.tar.zst", {}).output)
    new = [import_archive(archive, target, "other").new[0] for archive in archives]
    assert [run.path.parent.name[-2:] for run in new] == ["_2", "_3"]
    assert [read_origin(run).job_id for run in new] == ["L1@other", "L1@other.2"]
    assert {run.created_at for run in (local, *new)} == {local.created_at}
    assert tree(local.path) == before
    assert [import_archive(archive, target).existing for archive in archives] == [[new[0]], [new[1]]]


def test_leftovers_of_a_killed_import_are_removed(run, tmp_path):
    archive = write_archive([run], tmp_path / "a.tar.zst", {}).output
    leftover = tmp_path / "target" / ".llmb" / "import-old"
    leftover.mkdir(parents=True)
    (leftover / "partial").write_text("x")
    import_archive(archive, tmp_path / "target")
    assert [path.name for path in leftover.parent.iterdir()] == ["import.lock"]


def test_invalid_cluster_name_or_missing_archive(run, tmp_path):
    archive = write_archive([run], tmp_path / "a.tar.zst", {}).output
    with pytest.raises(ConfigError, match="use letters, digits"):
        import_archive(archive, tmp_path / "target", "../x")
    with pytest.raises(ConfigError, match="cannot read"):
        import_archive(tmp_path / "none", tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=r"cannot read .*fifo: it is not a regular file"):
        import_archive(tmp_path / "fifo", tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_corruption_is_refused_and_leaves_no_files(run, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = write_archive([run], folder / "a.tar.zst", {}).output.read_bytes()
        kind = data.draw(st.sampled_from(["bit", "cut", "more", "swap", "noise"]))
        at = data.draw(st.integers(0, len(good) - 1))
        if kind == "bit":
            bad = good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
        elif kind == "cut":
            bad = good[:at]
        elif kind == "more":
            bad = good + data.draw(st.binary(min_size=1, max_size=80))
        elif kind == "swap":
            bad = good[at:] + good[:at] if at else good[::-1]
        else:
            bad = data.draw(st.binary(max_size=300))
        (folder / "bad.tar.zst").write_bytes(bad)
        with pytest.raises(ConfigError, match="refused") as caught:
            import_archive(folder / "bad.tar.zst", folder / "target")
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in folder.iterdir()) == ["a.tar.zst", "bad.tar.zst"]


RUN_PATH = "workloads/t/experiments/n/n_20260102-030405/n"


def craft_archive(
    path: Path, members: list[tarfile.TarInfo], data: bytes = b"{}", manifest: dict | None = None
) -> Path:
    """Write an archive with a valid checksum and arbitrary members."""
    with path.open("w+b") as file:
        with compressed_writer(file) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
            for member in members:
                member.size = len(data) if member.isreg() else 0
                tar.addfile(member, io.BytesIO(data))
            if manifest is not None:
                text = json.dumps(manifest).encode()
                last = tarfile.TarInfo(f"{ROOT}/manifest.json")
                last.size = len(text)
                tar.addfile(last, io.BytesIO(text))
        append_checksum(file)
    return path


def member(name: str, **fields) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(header, field, value)
    return header


NO_FILES = {"format": 1, "runs": [], "files": []}


@pytest.mark.parametrize(
    ("members", "manifest", "message"),
    [
        ([member("/etc/passwd")], NO_FILES, "not a file of a run folder"),
        ([member(f"{ROOT}/{RUN_PATH}/../../x")], NO_FILES, "not a file of a run folder"),
        ([member(f"{ROOT}/{RUN_PATH}/a\nb")], NO_FILES, "not a file of a run folder"),
        ([member(f"{ROOT}/{RUN_PATH}/{'x' * 300}")], NO_FILES, "not a file of a run folder"),
        ([member(f"{ROOT}/.llmb/jobs.sqlite3")], NO_FILES, "not a file of a run folder"),
        ([member(f"{ROOT}/{RUN_PATH}/l", type=tarfile.SYMTYPE, linkname="/etc")], NO_FILES, "not a regular file"),
        ([member(f"{ROOT}/{RUN_PATH}/l", type=tarfile.LNKTYPE, linkname="x")], NO_FILES, "not a regular file"),
        ([member(f"{ROOT}/{RUN_PATH}/d", type=tarfile.CHRTYPE)], NO_FILES, "not a regular file"),
        ([member(f"{ROOT}/{RUN_PATH}/d", type=tarfile.FIFOTYPE)], NO_FILES, "not a regular file"),
        ([member(f"{ROOT}/{RUN_PATH}/d", type=tarfile.DIRTYPE)], NO_FILES, "not a regular file"),
        ([member(f"{ROOT}/{RUN_PATH}/x", pax_headers={"comment": "x" * 10**5})], NO_FILES, "not a regular file"),
        ([member(f"{ROOT}/{RUN_PATH}/x")] * 2, NO_FILES, "twice"),
        ([member(f"{ROOT}/{RUN_PATH}/origin.json")], NO_FILES, "or an origin.json"),
        ([member(f"{ROOT}/{RUN_PATH}/x", mtime=2**40)], NO_FILES, "invalid time"),
        ([member(f"{ROOT}/{RUN_PATH}/x")], NO_FILES, "does not match its manifest"),
        ([member(f"{ROOT}/{RUN_PATH}/x")], None, "its manifest is missing"),
        ([member(f"{ROOT}/manifest.json")], NO_FILES, "field 'format' is missing"),
        ([], {"format": 2, "runs": [], "files": []}, "it has format 2"),
        ([], {"format": 1, "runs": [{"path": "../..", "identity": "a", "job_id": None, "cluster": None}], "files": []},
         "is not a run folder"),
        ([member(f"{ROOT}/{RUN_PATH}{'/d' * 20}/x")], NO_FILES, "folders deep"),
        ([member(f"{ROOT}/{RUN_PATH}/x")], NO_FILES | {"files": [0] * 1000}, "lists more than its 1 files"),
    ],
)  # fmt: skip
def test_malicious_archive_is_refused_and_leaves_no_files(tmp_path, members, manifest, message):
    archive = craft_archive(tmp_path / "bad.tar.zst", members, manifest=manifest)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        import_archive(archive, tmp_path / "target")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.zst"]


@pytest.mark.parametrize(
    ("limit", "name", "message"),
    [
        ("MAX_JSON_FILE_BYTES", "config.json", "has 2 bytes; at most 1 are taken"),
        ("MAX_FILE_BYTES", "log.out", "has 2 bytes; at most 1 are taken"),
        ("MAX_TOTAL_BYTES", "log.out", "have more than 1 bytes"),
        ("MAX_MANIFEST_BYTES", "log.out", "its manifest is too large"),
    ],
)
def test_declared_sizes_are_bounded_before_anything_is_built(tmp_path, monkeypatch, limit, name, message):
    monkeypatch.setattr(unpack, limit, 1)
    archive = craft_archive(tmp_path / "bad.tar.zst", [member(f"{ROOT}/{RUN_PATH}/{name}")], manifest=NO_FILES)
    with pytest.raises(ConfigError, match=message):
        import_archive(archive, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.zst"]


def test_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checksummed_file, "ALWAYS_ALLOWED_BYTES", 2**20)
    archive = craft_archive(tmp_path / "bad.tar.zst", [member(f"{ROOT}/{RUN_PATH}/x")], bytes(64 * 2**20), NO_FILES)
    assert archive.stat().st_size < 2**14
    with pytest.raises(ConfigError, match="expands to far more"):
        import_archive(archive, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.zst"]


def test_imported_files_have_no_setuid_bits(run, tmp_path):
    archive = tmp_path / "a.tar.zst"
    write_archive([run], archive, {})
    (new,) = import_archive(archive, tmp_path / "target").new
    assert {stat.S_IMODE(path.stat().st_mode) for path in new.path.iterdir()} <= {0o644, 0o755}


def test_checksum_is_at_the_end_of_the_file(run, tmp_path):
    summary = write_archive([run], tmp_path / "a.tar.zst", {})
    assert summary.output.read_bytes()[-CHECKSUM_BYTES:].endswith(bytes.fromhex(summary.checksum))
