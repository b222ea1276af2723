"""Archives of runs: what is packed, in the same bytes for the same folders, and nothing is left of a failure."""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from archive_contents import MINUTE, content, decompress

from llmb.errors import ConfigError, LaunchError
from llmb.launch.archive.checksummed_file import append_checksum
from llmb.launch.archive.pack import has_ended, write_archive
from llmb.launch.run_files.pid_file import write_pid_file
from llmb.launch.run_folder import RunFolder


def test_archive_excludes_profiles_checkpoints_and_machine_local_files(run, tmp_path):
    for name in ("profile/a.json", "x.nsys-rep", "m.pt", "checkpoints/a.txt", "old.tar.gz", "core.123", "a_trace.json"):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    write_pid_file(run, os.getpid())
    (run.path / "picture").write_bytes(b"\x00\x01")
    (run.path / "link").symlink_to("/etc/passwd")
    summary = write_archive([run], tmp_path / "a.tar.zst", {})
    names = {name.rpartition("/")[2] for name in content(summary.output)}
    log = run.log.name
    assert names == {"manifest.json", "config.json", "events.rank0.jsonl", "job.sh", "llmb-config_L1.yaml", log}
    assert {Path(path).name for path in summary.left_out} == {"picture", "link"}


def test_archive_is_deterministic_and_readable_by_tar_and_zstd(make_run, tmp_path):
    runs = [make_run(tmp_path / "install", second) for second in range(3)]
    first = write_archive(runs, tmp_path / "a.tar.zst", {})
    second = write_archive(reversed(runs), tmp_path / "b.tar.zst", {})
    assert first.output.read_bytes() == second.output.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(decompress(first.output))) as tar:
        assert {(m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, "", "")}
        assert {m.mode for m in tar if m.name.endswith("job.sh")} == {0o755}
        assert {m.mtime for m in tar if m.name.endswith("config.json")} == {1_700_000_000}
    if shutil.which("zstd"):
        subprocess.run(["zstd", "-tq", first.output], check=True)


def test_existing_output_is_not_overwritten(run, tmp_path):
    output = tmp_path / "a.tar.zst"
    output.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_archive([run], output, {})
    assert output.read_text() == "mine"


def test_failed_archive_leaves_no_files(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match="no runs to archive"):
        write_archive([], out / "a.tar.zst", {})

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmb.launch.archive.pack.append_checksum", full)
    with pytest.raises(LaunchError, match="No space left"):
        write_archive([run], out / "a.tar.zst", {})
    assert list(out.iterdir()) == []


def test_archive_that_fails_verification_is_removed(run, tmp_path, monkeypatch):
    def corrupt(file):
        append_checksum(file)
        file.seek(20)
        file.write(b"?")

    monkeypatch.setattr("llmb.launch.archive.pack.append_checksum", corrupt)
    with pytest.raises(ConfigError, match="refused: it is truncated or modified"):
        write_archive([run], tmp_path / "out.tar.zst", {})
    assert not list(tmp_path.glob("*out*"))


# Blocks while packing until it is interrupted.
SLOW_ARCHIVE = """
import sys, tarfile, time
from llmb.cli.llmb_run import main
add = tarfile.TarFile.addfile
tarfile.TarFile.addfile = lambda *args: (add(*args), time.sleep(60))
sys.exit(main(["archive", sys.argv[1], "-o", "a.tar.zst"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_archive_leaves_no_files(run, tmp_path, number):
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", SLOW_ARCHIVE, str(run.path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, cwd=out, env=environ, stderr=subprocess.PIPE, text=True)
    while not list(out.glob(".a.tar.zst.*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "ERROR: interrupted\n")
    assert list(out.iterdir()) == []


def test_has_ended(run, config, tmp_path):
    assert has_ended(run)
    write_pid_file(run, os.getpid())
    assert not has_ended(run)
    run.result.write_text("{}")
    assert has_ended(run)
    assert not has_ended(RunFolder.create(tmp_path / "install", config, MINUTE))  # pending
