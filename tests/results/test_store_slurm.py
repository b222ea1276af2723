"""The job store and Slurm jobs: from submission to a name, old stores, many rows, filters, made anew."""

import multiprocessing
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError
from llmb.events import RunEnded
from llmb.results.derive import derive
from llmb.results.job_store import ADDED_COLUMNS, SCHEMA_VERSION, Store, temporary_id

FIRST_SCHEMA = (
    "job_id, launcher, workload, size, dtype, scale, gpu, proxy, profile, name, run_dir, created_at, updated_at, "
    "status, reason, step_time_s, tokens_per_s_per_gpu, tflops_per_gpu, mfu, output_tokens_per_s, reference_ratio"
)


@pytest.fixture(scope="module")
def config(recipes):
    return resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "jobs.sqlite3") as store:
        yield store


def submit(store, config, folder, slurm_id=None, **columns):
    temporary = store.add(config, Path(folder), launcher="slurm", status="submitting", **columns)
    return store.submitted(temporary, slurm_id) if slurm_id else temporary


def test_a_slurm_job_is_known_before_slurm_names_it(store, config):
    temporary = submit(store, config, "/a", retry_of="7", attempt=2, retries=3)
    assert temporary == temporary_id(Path("/a"))
    job = store.job(temporary)
    assert (job.status, job.going, job.slurm_id) == ("submitting", True, None)
    assert store.submitted(temporary, "17") == "17"
    job = store.job("17")
    assert (job.status, job.slurm_id, job.retry_of, job.attempt, job.retries) == ("pending", "17", "7", 2, 3)
    assert job.submitted_at is not None
    assert [j.job_id for j in store.retries_of("7")] == ["17"]
    with pytest.raises(ConfigError, match="no job"):
        store.job(temporary)


def test_a_number_that_slurm_gives_twice_overwrites_nothing(store, config):
    assert [submit(store, config, folder, "17") for folder in ("/a", "/b", "/c")] == ["17", "17-2", "17-3"]
    assert submit(store, config, "/d", "1") == "1"
    assert [job.slurm_id for job in store.jobs()] == ["17", "17", "17", "1"]


def test_whoever_names_a_job_second_learns_its_name(store, config):
    submit(store, config, "/a", "17")
    temporary = submit(store, config, "/b")
    assert store.submitted(temporary, "17") == "17-2"
    assert store.submitted(temporary, "17") == "17-2"
    assert len(store.jobs()) == 2


def test_a_refused_job_says_why(store, config):
    temporary = submit(store, config, "/a")
    store.refused(temporary, "sbatch: invalid account")
    assert (store.job(temporary).status, store.job(temporary).reason) == ("failed", "sbatch: invalid account")


def test_retries_go_to_the_first_who_takes_them(store, config):
    submit(store, config, "/a", "1", retries=2)
    assert store.jobs_to_retry() == []
    store.note("1", status="failed")
    assert [job.job_id for job in store.jobs_to_retry()] == ["1"]
    assert [store.take_retries("1"), store.take_retries("1")] == [2, 0]
    assert store.jobs_to_retry() == []


def test_many_changes_are_all_kept_or_none(store, config):
    with store.many():
        for number in range(200):
            submit(store, config, f"/{number}", str(number))
    assert len(store.jobs()) == 200
    with pytest.raises(ConfigError), store.many():
        _ = (store.note("5", status="running"), store.job("no such job"))
    assert store.job("5").status == "pending"


def test_who_looked_earlier_does_not_undo_what_was_found_later(store, config):
    seen = store.job(submit(store, config, "/a", "1"))
    store.move_on(seen, status="ok")
    store.move_on(seen, status="running")
    assert store.job("1").status == "ok"


def test_filters(store, config):
    submit(store, config, "/a", "1")
    store.finish(store.add(config, Path("/b")), derive(config, [RunEnded(status="failed", reason="test")]))
    store.add(replace(config, target="other"), Path("/c"), created_at=100.0)
    assert [j.run_dir for j in store.jobs()] == ["/c", "/a", "/b"]
    assert [j.run_dir for j in store.jobs(launcher="slurm")] == ["/a"]
    assert [j.run_dir for j in store.jobs(statuses=["failed", "running"])] == ["/c", "/b"]
    assert [j.run_dir for j in store.jobs(workloads=["other"])] == ["/c"]
    assert [j.run_dir for j in store.jobs(since=101.0, statuses=["failed"])] == ["/b"]
    assert [j.run_dir for j in store.jobs(1)] == ["/b"]


def test_made_anew_with_what_came_meanwhile(store, config):
    store.add(config, Path("/gone"))
    actual = store.jobs()
    store.add(config, Path("/new"), created_at=actual[0].created_at - 1)  # as another that makes it anew enters it
    unnamed = replace(actual[0], job_id="", run_dir="/unnamed")
    saved, new_row = replace(actual[0], run_dir="/kept"), replace(actual[0], job_id="L2", run_dir="/new")
    store.replace_all([saved, new_row, unnamed], known_run_dirs={"/gone"})
    assert sorted((j.job_id, j.run_dir) for j in store.jobs()) == [("L1", "/kept"), ("L2", "/new"), ("L3", "/unnamed")]


def old_store(path):
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE metadata (schema_version INTEGER)")
        old.execute("INSERT INTO metadata VALUES (1)")
        old.execute(f"CREATE TABLE jobs ({FIRST_SCHEMA}, PRIMARY KEY (job_id))")
        values = ("L1", "local", "w", "8b", "fp8", 8, "h100", None, 0, "n", "/run", 1.0, 2.0, "ok", None, 0.5)
        old.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * 21)})", (*values, *[None] * 5))
    old.close()


def test_an_old_store_is_brought_up_to_date_in_place(tmp_path, config):
    old_store(tmp_path / "jobs.sqlite3")
    for _ in range(2):
        with Store(tmp_path / "jobs.sqlite3") as store:
            job = store.job("L1")
            assert (job.status, job.step_time_s, job.slurm_state, job.attempt, job.retries) == ("ok", 0.5, None, 1, 0)
    with Store(tmp_path / "jobs.sqlite3") as store:
        assert store.add(config, Path("/b")) == "L2"
        assert submit(store, config, "/c", "9") == "9"


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_of_an_older_schema_gets_the_columns_of_the_newer(tmp_path, config, version):
    path = tmp_path / "jobs.sqlite3"
    with Store(path) as store:
        store.add(config, Path("/a"))
    with sqlite3.connect(path) as older:
        for column in (name for newer in range(version + 1, SCHEMA_VERSION + 1) for name in ADDED_COLUMNS[newer]):
            older.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        older.execute("UPDATE metadata SET schema_version = ?", (version,))
    older.close()
    with Store(path) as store:
        assert (store.job("L1").tpot_ms, store.job("L1").ttft_ms) == (None, None)
        assert store.job(store.add(config, Path("/b"))).settings is not None


def open_and_add(path, config, number):
    with Store(path) as store:
        store.add(config, Path(f"/{number}"))


@pytest.mark.slow
def test_many_that_open_an_old_store_at_once(tmp_path, config):
    old_store(tmp_path / "jobs.sqlite3")
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=open_and_add, args=(tmp_path / "jobs.sqlite3", config, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with Store(tmp_path / "jobs.sqlite3") as store:
        assert [writer.exitcode for writer in writers] == [0] * 4
        assert sorted(job.job_id for job in store.jobs()) == ["L1", "L2", "L3", "L4", "L5"]


def test_a_newer_store_is_refused_in_one_line(tmp_path):
    path = tmp_path / "jobs.sqlite3"
    Store(path).__exit__()
    with sqlite3.connect(path) as newer:
        newer.execute("UPDATE metadata SET schema_version = ?", (SCHEMA_VERSION + 1,))
    newer.close()
    with pytest.raises(ConfigError, match=f"has schema {SCHEMA_VERSION + 1}, this llmb reads up to {SCHEMA_VERSION}"):
        Store(path)


def test_rows_without_an_id_are_numbered_with_one_query(store, config):
    store.add(config, Path("/gone"))
    (gone,) = store.jobs()
    rows = [replace(gone, job_id="" if number else "L7", run_dir=f"/run{number}") for number in range(50)]
    statements = []
    store._db.set_trace_callback(statements.append)
    store.replace_all(rows, known_run_dirs={"/gone"})
    assert {job.run_dir: job.job_id for job in store.jobs()} == {f"/run{n}": f"L{7 + n}" for n in range(50)}
    assert sum("max(" in statement for statement in statements) == 1
