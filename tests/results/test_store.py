"""The job store: many writers at once, nothing lost, trouble in one line."""

import multiprocessing
from pathlib import Path

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError, LaunchError
from llmb.events import RunEnded, StepDone
from llmb.results.derive import derive
from llmb.results.job_store import Store


@pytest.fixture
def config(recipes):
    return resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))


def add_many(path, config, count):
    for _ in range(count):
        with Store(path) as store:
            job = store.add(config, Path("/run"))
            store.finish(job, derive(config, [RunEnded(status="failed", reason="test")]))


def test_ids_count_up_and_figures_are_kept(tmp_path, config):
    work = config.workload
    events = [StepDone(step=n, seconds=2.0, tokens=1000) for n in range(1, work.steps + 1)]
    with Store(tmp_path / "jobs.sqlite3") as store:
        assert [store.add(config, Path("/a")), store.add(config, Path("/b"))] == ["L1", "L2"]
        store.finish("L2", derive(config, [*events, RunEnded(status="ok")]))
        job = store.job("L2")
        assert (job.status, job.step_time_s, job.tokens_per_s_per_gpu) == ("ok", 2.0, 500.0)
        assert store.job("L1").status == "running"
        assert [j.job_id for j in store.jobs()] == ["L1", "L2"]
        assert [j.job_id for j in store.jobs(limit=1)] == ["L2"]
        with pytest.raises(ConfigError, match="no job 'L9'; the newest are: L1, L2"):
            store.job("L9")


@pytest.mark.slow
def test_many_processes_lose_nothing(tmp_path, config):
    path = tmp_path / "jobs.sqlite3"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=add_many, args=(path, config, 25)) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with Store(path) as store:
        jobs = store.jobs()
    assert len({j.job_id for j in jobs}) == 150
    assert {j.status for j in jobs} == {"failed"}


@pytest.mark.parametrize("version", [-67, 0, "x", 1.5, b"\xff"])
def test_a_damaged_schema_version_names_the_way_out(tmp_path, version):
    with Store(tmp_path / "jobs.sqlite3") as store:
        store._db.execute("UPDATE metadata SET schema_version = ?", (version,))
    with pytest.raises(LaunchError, match=r"its schema version is .*; move it away and run: llmb-run jobs rebuild"):
        Store(tmp_path / "jobs.sqlite3")


def test_a_broken_store_names_the_way_out(tmp_path):
    (tmp_path / "jobs.sqlite3").write_bytes(b"this is not a database" * 100)
    with pytest.raises(LaunchError, match="jobs rebuild"):
        Store(tmp_path / "jobs.sqlite3")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="LLMB_INSTALL"):
        Store(tmp_path / "file" / "x" / "jobs.sqlite3")
