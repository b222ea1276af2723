"""Archives of runs: no secret gets into one, nothing harmful out of one, and the same folders give the same bytes."""

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
from llmb.launch.archive.checksummed_file import SEAL_BYTES, packing, seal
from llmb.launch.archive.import_runs import import_archive
from llmb.launch.archive.manifest import ROOT
from llmb.launch.archive.pack import is_over, write_archive
from llmb.launch.archive.run_origin import origin_of
from llmb.launch.archive.scrub_json import scrub_json
from llmb.launch.archive.unpack import read_archive
from llmb.launch.run_folder import RunDir, mark_alive
from llmb.launch.secrets import scrub_thoroughly

zstandard = pytest.importorskip("zstandard")

MINUTE = datetime(2026, 1, 2, 3, 4, 5)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def make_run(config):
    """A run that has ended, with the files every run has."""

    def make(install: Path, second: int = 0, host: str = "node1", job_id: str = "L1", name: str = "") -> RunDir:
        wanted = replace(config, name=name or config.name)
        run = RunDir.create(install, wanted, MINUTE.replace(second=second))
        append(run.events(0), RunStarted(time=1000.0 + second, host=host))
        append(run.events(0), RunEnded(time=1001.0 + second, status="ok"))
        run.log.write_text("iteration 1: fast\n")
        run.write_job_script("#!/bin/bash\n")
        run.write_record(wanted, job_id)
        for path in run.path.iterdir():
            os.utime(path, (1.7e9, 1.7e9))
        return run

    return make


@pytest.fixture
def run(make_run, tmp_path) -> RunDir:
    return make_run(tmp_path / "install")


def unpacked(archive: Path) -> bytes:
    """All bytes of an archive after decompression, names and list of files included."""
    with archive.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(unpacked(archive))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What goes in


def test_an_archive_holds_the_run_without_what_is_large_or_of_this_machine_alone(run, tmp_path):
    for name in ("profile/a.json", "x.nsys-rep", "m.pt", "checkpoints/a.txt", "old.tar.gz", "core.123", "a_trace.json"):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    mark_alive(run, os.getpid())
    (run.path / "picture").write_bytes(b"\x00\x01")
    (run.path / "link").symlink_to("/etc/passwd")
    written = write_archive([run], tmp_path / "a.tar.zst", {})
    names = {name.rpartition("/")[2] for name in content(written.output)}
    log = run.log.name
    assert names == {"manifest.json", "config.json", "events.rank0.jsonl", "job.sh", "llmb-config_L1.yaml", log}
    assert {Path(path).name for path in written.left_out} == {"picture", "link"}


def test_the_same_folders_give_the_same_bytes_that_tar_and_zstd_can_read(make_run, tmp_path):
    runs = [make_run(tmp_path / "install", second) for second in range(3)]
    first = write_archive(runs, tmp_path / "a.tar.zst", {})
    second = write_archive(reversed(runs), tmp_path / "b.tar.zst", {})
    assert first.output.read_bytes() == second.output.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(unpacked(first.output))) as tar:
        assert {(m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, "", "")}
        assert {m.mode for m in tar if m.name.endswith("job.sh")} == {0o755}
        assert {m.mtime for m in tar if m.name.endswith("config.json")} == {1_700_000_000}
    if shutil.which("zstd"):
        subprocess.run(["zstd", "-tq", first.output], check=True)


def test_a_file_that_is_there_is_not_written_over(run, tmp_path):
    output = tmp_path / "a.tar.zst"
    output.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not written over"):
        write_archive([run], output, {})
    assert output.read_text() == "mine"


def test_a_failure_leaves_nothing(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match="no runs to archive"):
        write_archive([], out / "a.tar.zst", {})

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmb.launch.archive.pack.seal", full)
    with pytest.raises(LaunchError, match="No space left"):
        write_archive([run], out / "a.tar.zst", {})
    assert list(out.iterdir()) == []


def test_what_does_not_read_back_is_not_kept(run, tmp_path, monkeypatch):
    def spoil(file):
        seal(file)
        file.seek(20)
        file.write(b"?")

    monkeypatch.setattr("llmb.launch.archive.pack.seal", spoil)
    with pytest.raises(ConfigError, match="refused: it was cut off or changed"):
        write_archive([run], tmp_path / "out.tar.zst", {})
    assert not list(tmp_path.glob("*out*"))


# Waits inside the archive until it is interrupted, however late that comes.
SLOWLY = """
import sys, tarfile, time
from llmb.cli.llmb_run import main
add = tarfile.TarFile.addfile
tarfile.TarFile.addfile = lambda *given: (add(*given), time.sleep(60))
sys.exit(main(["archive", sys.argv[1], "-o", "a.tar.zst"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(run, tmp_path, number):
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", SLOWLY, str(run.path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, cwd=out, env=environ, stderr=subprocess.PIPE, text=True)
    while not list(out.glob(".a.tar.zst.*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "ERROR: interrupted\n")
    assert list(out.iterdir()) == []


def test_only_a_run_that_has_ended_is_over(run, config, tmp_path):
    assert is_over(run)
    mark_alive(run, os.getpid())
    assert not is_over(run)
    run.result.write_text("{}")
    assert is_over(run)
    assert not is_over(RunDir.create(tmp_path / "install", config, MINUTE))  # waits in a queue


# Secrets

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
word = st.text(LETTERS, min_size=36, max_size=50)
shaped = st.one_of(
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
forms = st.sampled_from(
    ["{n}={s}", "export {n}='{s}'", '"{n}": "{s}"', "{n}: {s}", "'{n}': '{s}'", "--{n} {s}", '{{\\"{n}\\": \\"{s}\\"}}']
)


@given(secret=shaped, before=anything, after=anything)
@some
def test_a_secret_with_a_shape_never_gets_into_an_archive(run, before, secret, after):
    tail = " " if after[:1].isalnum() or after[:1] in "_-." else ""
    (run.path / "notes.txt").write_text(before + secret + tail + after, newline="", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        written = write_archive([run], Path(folder) / "a.tar.zst", {})
        whole = unpacked(written.output)
    for line in secret.split("\n"):
        if not line.startswith("-----") and line not in before + after:
            assert line.encode() not in whole


@given(name=names, secret=secret_word, form=forms, before=anything, after=anything)
@some
def test_a_secret_under_its_name_never_gets_into_an_archive(run, name, secret, form, before, after):
    (run.path / "notes.txt").write_text(
        f"{before}\n{form.format(n=name, s=secret)}\n{after}", newline="", encoding="utf-8"
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = content(write_archive([run], Path(folder) / "a.tar.zst", {}).output)
    (notes,) = [text for path, text in whole.items() if path.endswith("notes.txt")]
    assert secret.encode() not in notes.replace(before.encode(), b"").replace(after.encode(), b"")


@given(secret=st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=6, max_size=30), at=st.data())
@some
def test_a_secret_of_the_environment_never_gets_into_an_archive(run, secret, at):
    text = at.draw(anything) + secret + at.draw(anything)
    wide = json.dumps({"said": secret}) + "\n" + text
    for path in (run.path / "notes.txt", run.log):
        path.write_text(wide, newline="", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        written = write_archive([run], Path(folder) / "a.tar.zst", {"SOME_KEY": secret})
        files = {n.rpartition("/")[2]: text for n, text in content(written.output).items()}
    for name in ("notes.txt", run.log.name):
        if name in files and "*" not in secret:
            assert not [s for line in secret.splitlines() if len(s := line) >= 6 and s.encode() in files[name]]


def test_a_secret_named_in_one_file_is_found_in_another_that_does_not_name_it(run, tmp_path):
    value = "0123456789abcdef0123456789abcdef01234567"
    (run.path / "settings.txt").write_text(f"WANDB_API_KEY={value}\n")
    run.log.write_text(f"login as ...{value}...\n")
    assert value.encode() not in unpacked(write_archive([run], tmp_path / "a.tar.zst", {}).output)


def test_a_key_that_lies_across_pieces_of_a_file_is_whole(run, tmp_path, monkeypatch):
    monkeypatch.setattr("llmb.launch.archive.scrub_files.PIECE", 64)
    key = "\n".join(
        ["-----BEGIN PRIVATE KEY-----", *["QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="] * 20, "-----END PRIVATE KEY-----"]
    )
    run.log.write_text(f"first\n{key}\nlast\n")
    (log,) = [v for k, v in content(write_archive([run], tmp_path / "a.tar.zst", {}).output).items() if "/log-" in k]
    assert log == b"first\n***\nlast\n"


# Text in which names, quotes and brackets stand where they deceive.
deceiving = st.lists(
    st.sampled_from([*"=:'\"\\{]$@,\n a*", "HF_TOKEN", "key", "--api-key", "***", "http://", "hf_" + "a1" * 11, "b7"]),
    max_size=12,
).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | deceiving,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | deceiving, inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.sampled_from([None, 2]))
@settings(max_examples=300, deadline=None)
def test_what_was_json_stays_json_and_scrubbing_twice_changes_nothing(value, indent):
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
def test_figures_and_ordinary_words_stay(text):
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
def test_what_stands_after_a_name_goes_and_the_rest_stays(text, clean):
    assert scrub_thoroughly(text) == clean


def test_people_go_only_when_asked(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "alice")
    run.log.write_text("/home/bob/data /lustre/alice/runs /lustre/alice2 malice\n")

    def log(**options) -> bytes:
        output = tmp_path / f"{len(options)}.tar.zst"
        return next(v for k, v in content(write_archive([run], output, {}, **options).output).items() if "/log-" in k)

    assert log() == run.log.read_bytes()
    assert log(anonymous=True) == b"/home/anonymous/data /lustre/anonymous/runs /lustre/alice2 malice\n"


# What comes out


@given(count=st.integers(1, 3), text=anything, executable=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_archive_import_archive_gives_the_same_bytes(make_run, count, text, executable):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [make_run(folder / "there", second, job_id=f"L{second}") for second in range(count)]
        extra = runs[0].path / "deep" / "notes.txt"
        extra.parent.mkdir()
        extra.write_text(text, encoding="utf-8")
        extra.chmod(0o755 if executable else 0o600)
        first = write_archive(runs, folder / "a.tar.zst", {})
        done = import_archive(first.output, folder / "here")
        assert (len(done.new), done.known) == (count, [])
        second = write_archive(done.new, folder / "b.tar.zst", {})
        assert read_archive(second.output, None).manifest == read_archive(first.output, None).manifest
        assert second.output.read_bytes() == first.output.read_bytes()


def test_importing_twice_changes_nothing(run, tmp_path):
    archive = write_archive([run], tmp_path / "a.tar.zst", {}).output
    here = tmp_path / "here"
    (new,) = import_archive(archive, here).new
    assert origin_of(new).cluster == "node1"
    assert origin_of(new).job_id == "L1@node1"
    before = tree(here)
    done = import_archive(archive, here, "another")
    assert (done.new, done.known) == ([], [new])
    assert tree(here) == before
    own = import_archive(archive, tmp_path / "install")  # where it came from
    assert (own.new, own.known) == ([], [run])
    assert origin_of(run) is None


def test_runs_of_one_name_and_second_lie_side_by_side(make_run, tmp_path):
    here = tmp_path / "here"
    own = make_run(here, host="mine")
    before = tree(own.path)
    archives = []
    for host in ("a", "b"):
        run = make_run(tmp_path / host, host=host)
        archives.append(write_archive([run], tmp_path / f"{host}.tar.zst", {}).output)
    new = [import_archive(archive, here, "other").new[0] for archive in archives]
    assert [run.path.parent.name[-2:] for run in new] == ["_2", "_3"]
    assert [origin_of(run).job_id for run in new] == ["L1@other", "L1@other.2"]
    assert {run.created_at for run in (own, *new)} == {own.created_at}
    assert tree(own.path) == before
    assert [import_archive(archive, here).known for archive in archives] == [[new[0]], [new[1]]]


def test_what_a_killed_import_left_is_cleared(run, tmp_path):
    archive = write_archive([run], tmp_path / "a.tar.zst", {}).output
    left = tmp_path / "here" / ".llmb" / "import-old"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    import_archive(archive, tmp_path / "here")
    assert [path.name for path in left.parent.iterdir()] == ["import.lock"]


def test_a_bad_name_for_a_cluster(run, tmp_path):
    archive = write_archive([run], tmp_path / "a.tar.zst", {}).output
    with pytest.raises(ConfigError, match="use letters, digits"):
        import_archive(archive, tmp_path / "here", "../x")
    with pytest.raises(ConfigError, match="cannot read"):
        import_archive(tmp_path / "none", tmp_path / "here")
    assert not (tmp_path / "here").exists()


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_refused_in_one_line_and_leaves_nothing(run, data):
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
            import_archive(folder / "bad.tar.zst", folder / "here")
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in folder.iterdir()) == ["a.tar.zst", "bad.tar.zst"]


PLACE = "workloads/t/experiments/n/n_20260102-030405/n"


def crafted(path: Path, members: list[tarfile.TarInfo], data: bytes = b"{}", manifest: dict | None = None) -> Path:
    """A well sealed archive that somebody else made."""
    with path.open("w+b") as file:
        with packing(file) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
            for member in members:
                member.size = len(data) if member.isreg() else 0
                tar.addfile(member, io.BytesIO(data))
            if manifest is not None:
                text = json.dumps(manifest).encode()
                last = tarfile.TarInfo(f"{ROOT}/manifest.json")
                last.size = len(text)
                tar.addfile(last, io.BytesIO(text))
        seal(file)
    return path


def member(name: str, **fields) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


NO_FILES = {"format": 1, "runs": [], "files": []}


@pytest.mark.parametrize(
    ("members", "manifest", "said"),
    [
        ([member("/etc/passwd")], NO_FILES, "no file of a run folder"),
        ([member(f"{ROOT}/{PLACE}/../../x")], NO_FILES, "no file of a run folder"),
        ([member(f"{ROOT}/{PLACE}/a\nb")], NO_FILES, "no file of a run folder"),
        ([member(f"{ROOT}/{PLACE}/{'x' * 300}")], NO_FILES, "no file of a run folder"),
        ([member(f"{ROOT}/.llmb/jobs.sqlite3")], NO_FILES, "no file of a run folder"),
        ([member(f"{ROOT}/{PLACE}/l", type=tarfile.SYMTYPE, linkname="/etc")], NO_FILES, "not a plain file"),
        ([member(f"{ROOT}/{PLACE}/l", type=tarfile.LNKTYPE, linkname="x")], NO_FILES, "not a plain file"),
        ([member(f"{ROOT}/{PLACE}/d", type=tarfile.CHRTYPE)], NO_FILES, "not a plain file"),
        ([member(f"{ROOT}/{PLACE}/d", type=tarfile.FIFOTYPE)], NO_FILES, "not a plain file"),
        ([member(f"{ROOT}/{PLACE}/d", type=tarfile.DIRTYPE)], NO_FILES, "not a plain file"),
        ([member(f"{ROOT}/{PLACE}/x", pax_headers={"comment": "x" * 10**5})], NO_FILES, "not a plain file"),
        ([member(f"{ROOT}/{PLACE}/x")] * 2, NO_FILES, "twice"),
        ([member(f"{ROOT}/{PLACE}/origin.json")], NO_FILES, "says itself where it comes from"),
        ([member(f"{ROOT}/{PLACE}/x", mtime=2**40)], NO_FILES, "impossible time"),
        ([member(f"{ROOT}/{PLACE}/x")], NO_FILES, "not as its list says"),
        ([member(f"{ROOT}/{PLACE}/x")], None, "its list of files is missing"),
        ([member(f"{ROOT}/manifest.json")], NO_FILES, "field 'format' is missing"),
        ([], {"format": 2, "runs": [], "files": []}, "it has format 2"),
        ([], {"format": 1, "runs": [{"path": "../..", "identity": "a", "job_id": None, "cluster": None}], "files": []},
         "is no run folder"),
    ],
)  # fmt: skip
def test_a_harmful_archive_is_refused_and_leaves_nothing(tmp_path, members, manifest, said):
    archive = crafted(tmp_path / "bad.tar.zst", members, manifest=manifest)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        import_archive(archive, tmp_path / "here")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.zst"]


def test_a_bomb_is_refused_before_it_fills_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(checksummed_file, "ALWAYS_ALLOWED", 2**20)
    archive = crafted(tmp_path / "bad.tar.zst", [member(f"{ROOT}/{PLACE}/x")], bytes(64 * 2**20), NO_FILES)
    assert archive.stat().st_size < 2**14
    with pytest.raises(ConfigError, match="unpacks to far more"):
        import_archive(archive, tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.zst"]


def test_nothing_imported_may_be_run_as_another_user(run, tmp_path):
    archive = tmp_path / "a.tar.zst"
    write_archive([run], archive, {})
    (new,) = import_archive(archive, tmp_path / "here").new
    assert {stat.S_IMODE(path.stat().st_mode) for path in new.path.iterdir()} <= {0o644, 0o755}


def test_the_seal_is_the_end_of_the_file(run, tmp_path):
    written = write_archive([run], tmp_path / "a.tar.zst", {})
    assert written.output.read_bytes()[-SEAL_BYTES:].endswith(bytes.fromhex(written.seal))
