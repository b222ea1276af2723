"""`llmb-run archive` and `import`: runs of one cluster compared with those of another."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from llmb.cli.stored_runs import write_result
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.run_folder import RunFolder, store_path
from llmb.results.job_store import Store

pytest.importorskip("zstandard")


@pytest.fixture
def config(recipes):
    return resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))


@pytest.fixture
def make_run(config):
    """Return a function that creates a run of a cluster with a step time; it returns job id and folder."""

    def make(install: Path, seconds: float, cluster: str | None = None, ended: bool = True) -> tuple[str, RunFolder]:
        run = RunFolder.create(install, config, datetime(2026, 1, 2, 3, 4, 5))
        append(run.events(0), RunStarted(time=1000.0 + seconds, host="node1"))
        for step in range(1, config.workload.steps + 1):
            append(run.events(0), StepDone(step=step, seconds=seconds * (1 + step % 7 / 1000), tokens=1000))
        with Store(store_path(install)) as store:
            job_id = store.add(config, run.path, created_at=run.created_at)
            run.write_record(config, job_id, cluster_name=cluster)
            if ended:
                append(run.events(0), RunEnded(time=2000.0, status="ok"))
                store.finish(job_id, write_result(run, config))
        return job_id, run

    return make


@pytest.fixture
def here(tmp_path) -> Path:
    return tmp_path / "llmb"  # $LLMB_INSTALL of every test


def rows(llmb_run) -> list[dict]:
    return [json.loads(line) for line in llmb_run("jobs", "--json")[1].splitlines()]


def test_runs_of_two_clusters_are_compared(llmb_run, make_run, here, tmp_path, monkeypatch):
    make_run(tmp_path / "eos", 1.0, cluster="eos")
    make_run(here, 2.0)
    file = tmp_path / "eos.tar.zst"
    with monkeypatch.context() as on_cluster:
        on_cluster.setenv("LLMB_INSTALL", str(tmp_path / "eos"))
        code, out, err = llmb_run("archive", "--output", file)
    assert (code, err) == (0, "")
    assert f"{file}: 1 runs, " in out

    code, out, _ = llmb_run("import", file)
    assert (code, out) == (0, "1 runs imported from eos, 0 were here already\n")
    stored = rows(llmb_run)
    assert {(row["job_id"], row["launcher"], row["status"]) for row in stored} == {
        ("L1", "local", "ok"),
        ("L1@eos", "imported", "ok"),
    }
    assert "L1@eos" in llmb_run("jobs", "--on", "imported")[1]
    code, out, _ = llmb_run("compare", "L1", "L1@eos")
    assert code == 0
    assert "(imported from eos)" in out.splitlines()[1]
    assert "imported" not in out.splitlines()[0]
    assert "B is faster, by 100.0 %" in out
    assert json.loads(llmb_run("compare", "L1", "L1@eos", "--json")[1])["clusters"] == [None, "eos"]

    assert llmb_run("import", file)[1] == "0 runs imported, 1 were here already\n"
    assert rows(llmb_run) == stored
    assert llmb_run("jobs", "rebuild")[1].startswith("2 runs found")
    imported = [row for row in stored if row["launcher"] == "imported"]
    assert [row for row in rows(llmb_run) if row["launcher"] == "imported"] == imported


def test_import_writes_the_row_that_a_killed_import_did_not(llmb_run, make_run, tmp_path, here):
    _, run = make_run(tmp_path / "there", 1.0)
    file = tmp_path / "a.tar.zst"
    llmb_run("archive", run.path, "-o", file)
    llmb_run("import", file, "--as", "other")
    before = rows(llmb_run)
    os.remove(store_path(here))
    assert llmb_run("import", file)[1] == "0 runs imported, 1 were here already\n"
    assert rows(llmb_run) == before
    assert [row["job_id"] for row in before] == ["L1@other"]


def test_archive_holds_only_selected_runs_that_have_ended(llmb_run, make_run, here, tmp_path):
    ended_id, _ = make_run(here, 1.0)
    active_id, run = make_run(here, 1.0, ended=False)
    (run.pid_file).write_text(json.dumps({"pid": 1, "started": 1, "host": "another"}))
    code, out, err = llmb_run("archive", "-o", tmp_path / "all.tar.zst")
    assert (code, err) == (0, "left out: 1 run that has not ended\n")
    code, _, err = llmb_run("archive", active_id, "-o", tmp_path / "b.tar.zst")
    assert (code, err) == (1, f"ERROR: not ended yet: {active_id}; wait, or end it: llmb-run jobs cancel {active_id}\n")
    code, out, _ = llmb_run("archive", ended_id, "--json", "-o", tmp_path / "c.tar.zst")
    assert (code, json.loads(out)["runs"]) == (0, 1)
    assert (tmp_path / "c.tar.zst").read_bytes() == (tmp_path / "all.tar.zst").read_bytes()
    code, _, err = llmb_run("archive", "--since", "2026-06-01", "-o", tmp_path / "d.tar.zst")
    assert (code, err) == (1, "ERROR: there are no runs to archive\n")
    assert not (tmp_path / "d.tar.zst").exists()


def test_archive_masks_secrets_of_the_environment(llmb_run, make_run, here, tmp_path, monkeypatch):
    import zstandard

    _, run = make_run(here, 1.0)
    run.log.write_text("my word is correct horse\n")
    monkeypatch.setenv("VAULT_PASSWORD", "correct horse")
    assert llmb_run("archive", "-o", tmp_path / "a.tar.zst")[0] == 0
    with (tmp_path / "a.tar.zst").open("rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file).read()
    assert b"my word is ***" in content
    assert b"correct horse" not in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["archive", "L9"], "ERROR: no job 'L9'"),
        (["archive", "--since", "yesterday"], "ERROR: --since 'yesterday' is not a time"),
        (["archive", "-o", "/nowhere/a.tar.zst", "RUN"], "ERROR: cannot write /nowhere/a.tar.zst"),
        (["import", "missing.tar.zst"], "ERROR: cannot read missing.tar.zst"),
        (["import", "config.json"], "ERROR: config.json is refused: it is truncated or modified"),
        (["import", "config.json", "--as", "a/b"], "ERROR: --as 'a/b': use letters"),
    ],
)
def test_invalid_archive_request_is_one_line(llmb_run, make_run, here, monkeypatch, arguments, message):
    _, run = make_run(here, 1.0)
    monkeypatch.chdir(run.path)
    code, out, err = llmb_run(*(str(run.path) if word == "RUN" else word for word in arguments))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(message)


def test_without_zstandard_the_error_says_what_to_install(make_run, here, tmp_path):
    _, run = make_run(here, 1.0)
    code = (
        "import sys; sys.modules['zstandard'] = None; from llmb.cli.llmb_run import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "archive", str(run.path), "-o", "a.tar.zst"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    message = "ERROR: archives need the zstandard package: pip install zstandard\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert not list(tmp_path.glob("*a.tar.zst*"))
