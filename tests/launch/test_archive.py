"""Archives of runs: no secret is packed, nothing harmful is unpacked, and the same folders give the same bytes."""

import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmb.errors import ConfigError, LaunchError
from llmb.events import RunEnded, RunStarted, append
from llmb.launch.archive import checksummed_file
from llmb.launch.archive.checksummed_file import CHECKSUM_BYTES, append_checksum, compressed_writer
from llmb.launch.archive.import_runs import import_archive
from llmb.launch.archive.manifest import ROOT
from llmb.launch.archive.pack import has_ended, write_archive
from llmb.launch.archive.run_origin import read_origin
from llmb.launch.archive.scrub_files import scrub_json
from llmb.launch.archive.unpack import read_archive
from llmb.launch.run_folder import RunFolder, write_pid_file
from llmb.launch.secrets import scrub_thoroughly

zstandard = pytest.importorskip("zstandard")

MINUTE = datetime(2026, 1, 2, 3, 4, 5)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def make_run(config):
    """Create a run that has ended, with the files every run has."""

    def make(install: Path, second: int = 0, host: str = "node1", job_id: str = "L1", name: str = "") -> RunFolder:
        named = replace(config, name=name or config.name)
        run = RunFolder.create(install, named, MINUTE.replace(second=second))
        append(run.events(0), RunStarted(time=1000.0 + second, host=host))
        append(run.events(0), RunEnded(time=1001.0 + second, status="ok"))
        run.log.write_text("iteration 1: fast\n")
        run.write_job_script("#!/bin/bash\n")
        run.write_record(named, job_id)
        for path in run.path.iterdir():
            os.utime(path, (1.7e9, 1.7e9))
        return run

    return make


@pytest.fixture
def run(make_run, tmp_path) -> RunFolder:
    return make_run(tmp_path / "install")


def decompress(archive: Path) -> bytes:
    """Return all bytes of an archive after decompression, names and manifest included."""
    with archive.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(decompress(archive))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Packing


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


# Secrets

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
word = st.text(LETTERS, min_size=36, max_size=50)
token = st.one_of(
    word.map(lambda w: f"hf_{w}"),
    word.map(lambda w: f"ghp_{w}"),
    word.map(lambda w: f"nvapi-{w}"),
    word.map(lambda w: "AKIA" + w.upper()[:16]),
    word.map(lambda w: f"eyJ{w[:12]}.{w[12:24]}.{w[24:]}"),
    word.map(lambda w: f"-----BEGIN RSA PRIVATE KEY-----\n{w}\n{w[::-1]}\n-----END RSA PRIVATE KEY-----"),
)
names = st.sampled_from(
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "my_secret",
        "api-key",
        "accessToken",
        "passwd",
    ]
)
anything = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
secret_word = st.text(LETTERS + "!#%+-./:@^_~", min_size=8, max_size=30).filter(
    lambda w: re.search("[A-Za-z]{3}", w) and w[0].isalpha() and "***" not in w
)
assignments = st.sampled_from(
    ["{n}={s}", "export {n}='{s}'", '"{n}": "{s}"', "{n}: {s}", "'{n}': '{s}'", "--{n} {s}", '{{\\"{n}\\": \\"{s}\\"}}']
)


@pytest.mark.slow
@given(secret=token, before=anything, after=anything)
@some
def test_token_is_never_packed(run, before, secret, after):
    tail = " " if after[:1].isalnum() or after[:1] in "_-." else ""
    (run.path / "notes.txt").write_text(before + secret + tail + after, newline="", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        summary = write_archive([run], Path(folder) / "a.tar.zst", {})
        packed = decompress(summary.output)
    for line in secret.split("\n"):
        if not line.startswith("-----") and line not in before + after:
            assert line.encode() not in packed


@pytest.mark.slow
@given(name=names, secret=secret_word, assignment=assignments, before=anything, after=anything)
@some
def test_secret_after_its_name_is_never_packed(run, name, secret, assignment, before, after):
    (run.path / "notes.txt").write_text(
        f"{before}\n{assignment.format(n=name, s=secret)}\n{after}", newline="", encoding="utf-8"
    )
    with tempfile.TemporaryDirectory() as folder:
        files = content(write_archive([run], Path(folder) / "a.tar.zst", {}).output)
    (notes,) = [text for path, text in files.items() if path.endswith("notes.txt")]
    assert secret.encode() not in notes.replace(before.encode(), b"").replace(after.encode(), b"")


@pytest.mark.slow
@given(secret=st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=6, max_size=30), at=st.data())
@some
def test_secret_of_the_environment_is_never_packed(run, secret, at):
    text = at.draw(anything) + secret + at.draw(anything)
    notes = json.dumps({"value": secret}) + "\n" + text
    for path in (run.path / "notes.txt", run.log):
        path.write_text(notes, newline="", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        summary = write_archive([run], Path(folder) / "a.tar.zst", {"SOME_KEY": secret})
        files = {n.rpartition("/")[2]: text for n, text in content(summary.output).items()}
    for name in ("notes.txt", run.log.name):
        if name in files and "*" not in secret:
            assert not [s for line in secret.splitlines() if len(s := line) >= 6 and s.encode() in files[name]]


def test_secret_named_in_one_file_is_scrubbed_from_another(run, tmp_path):
    value = "0123456789abcdef0123456789abcdef01234567"
    (run.path / "settings.txt").write_text(f"WANDB_API_KEY={value}\n")
    run.log.write_text(f"login as ...{value}...\n")
    assert value.encode() not in decompress(write_archive([run], tmp_path / "a.tar.zst", {}).output)


def test_private_key_is_not_split_over_chunks(run, tmp_path, monkeypatch):
    monkeypatch.setattr("llmb.launch.archive.scrub_files.CHUNK_BYTES", 64)
    key = "\n".join(
        ["-----BEGIN PRIVATE KEY-----", *["QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="] * 20, "-----END PRIVATE KEY-----"]
    )
    run.log.write_text(f"first\n{key}\nlast\n")
    (log,) = [v for k, v in content(write_archive([run], tmp_path / "a.tar.zst", {}).output).items() if "/log-" in k]
    assert log == b"first\n***\nlast\n"


# Text with misleading names, quotes and brackets.
misleading = st.lists(
    st.sampled_from([*"=:'\"\\{]$@,\n a*", "HF_TOKEN", "key", "--api-key", "***", "http://", "hf_" + "a1" * 11, "b7"]),
    max_size=12,
).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | misleading,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | misleading, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(json_values, st.sampled_from([None, 2]))
@settings(max_examples=300, deadline=None)
def test_scrubbed_json_is_valid_and_scrubbing_is_idempotent(value, indent):
    clean = scrub_json(json.dumps(value, indent=indent), scrub_thoroughly)
    json.loads(clean)
    assert "hf_a1" not in clean
    assert scrub_json(clean, scrub_thoroughly) == clean


@pytest.mark.parametrize(
    "text",
    [
        '"num_key_value_heads": 8, "kv_heads": 1, "first_token": 12.5, "first_token": null, "first_token": [1.2]',
        "time per output token: 12.3ms, tokens: 100, MAX_NUM_TOKENS=8192",
        "KeyError: 'model'",
        "HF_TOKEN: '***'",
        "NCCL_DEBUG=INFO TOKENIZERS_PARALLELISM=false",
    ],
)
def test_numbers_and_ordinary_words_are_not_scrubbed(text):
    assert scrub_thoroughly(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("DB_PASSWORD=hunter2 and more", "DB_PASSWORD=***"),
        ("run with API_KEY=12345678, TP=2", "run with API_KEY=***, TP=2"),
        ('{"password": 1234, "a": 1}', '{"password": "***", "a": 1}'),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: '***'"),
        ('["--api-key",\n  "mine"]', '["--api-key",\n  "***"]'),
        ("export A_SECRET='it'\"'\"'s'", "export A_SECRET='***'"),
        ("clone https://me:pass@host/x", "clone https://***@host/x"),
        ("GET /v1?api_key=mine&x=1", "GET /v1?api_key=***&x=1"),
    ],
)
def test_only_the_value_after_a_name_is_scrubbed(text, clean):
    assert scrub_thoroughly(text) == clean


def test_user_names_are_scrubbed_only_with_anonymous(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "alice")
    run.log.write_text("/home/bob/data /lustre/alice/runs /lustre/alice2 malice\n")

    def log(**options) -> bytes:
        output = tmp_path / f"{len(options)}.tar.zst"
        return next(v for k, v in content(write_archive([run], output, {}, **options).output).items() if "/log-" in k)

    assert log() == run.log.read_bytes()
    assert log(anonymous=True) == b"/home/anonymous/data /lustre/anonymous/runs /lustre/alice2 malice\n"


# Importing


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
    ],
)  # fmt: skip
def test_malicious_archive_is_refused_and_leaves_no_files(tmp_path, members, manifest, message):
    archive = craft_archive(tmp_path / "bad.tar.zst", members, manifest=manifest)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        import_archive(archive, tmp_path / "target")
    assert "\n" not in str(caught.value)
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
