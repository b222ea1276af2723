"""One $LLMB_INSTALL for two real users: all works with a shared group, and without one line says why not."""

import os
import shutil
import stat
import tempfile
from datetime import datetime
from pathlib import Path

import pytest
from other_users import as_user, needs_root

from llmb.cli.install.shared_folder import share_folder
from llmb.cli.jobs.auto_retry import own_jobs_to_retry
from llmb.cli.jobs.cancel import _cancel_local
from llmb.cli.jobs.lost_submissions import may_still_appear
from llmb.cli.jobs.polling import Poller
from llmb.cli.stored_runs import write_result
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import write_atomic
from llmb.errors import ConfigError
from llmb.events import RunEnded, append
from llmb.launch.engine_log import EngineLog
from llmb.launch.event_tail import append_run_end
from llmb.launch.run_files.pid_file import write_pid_file
from llmb.launch.run_folder import RunFolder, make_folder, store_path
from llmb.launch.run_lock import exclusive_run_lock
from llmb.results.job_store import Store

GROUP, FIRST, SECOND = "users", "daemon", "bin"  # of every Debian
pytestmark = needs_root


@pytest.fixture
def config(recipes, tmp_path):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    run_once(tmp_path, config)  # imports all modules: other users may not be able to read them
    finish_all(tmp_path)
    return config


@pytest.fixture
def root():
    """A folder of the first user that others can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="llmb-shared-"))
    folder.chmod(0o755)
    shutil.chown(folder, FIRST, FIRST)
    yield folder / "llmb"
    shutil.rmtree(folder)


def run_once(root: Path, config) -> str:
    """Do what a local run does with files, up to an engine that is killed: return its job id."""
    with exclusive_run_lock(root, config), Store(store_path(root)) as store:
        run = RunFolder.create(root, config, datetime.now())
        job_id = store.add(config, run.path)
        run.write_record(config, job_id)
        run.add_short_path(job_id)
        os.close(EngineLog(run.log, ())._file)
        write_pid_file(run, 2**22 + 1)  # no process has it
        append(run.events(0), RunEnded(time=1.0, status="failed", reason="an error"))
    return job_id


def finish_all(root: Path) -> list[tuple[str, str]]:
    """Refresh all jobs, as `llmb-run jobs` does."""
    notes: list[str] = []
    with Store(store_path(root)) as store:
        jobs = [(job.job_id, job.status) for job in Poller(store, notes.append).refresh(store.jobs())]
    assert notes == [], notes
    return jobs


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_two_users_of_a_group_share_a_folder(root, config, umask, campaign):
    campaign("users of one folder, per umask", 2)
    assert "is shared with group users" in as_user(FIRST, GROUP, lambda: share_folder(root, GROUP), umask)
    assert as_user(FIRST, GROUP, lambda: run_once(root, config), umask) == "L1"
    assert as_user(SECOND, GROUP, lambda: run_once(root, config), umask) == "L2"
    # Each ends the other's run in the table and in its folder: the second all, then the first adds to the second's.
    assert as_user(SECOND, GROUP, lambda: finish_all(root), umask) == str([("L1", "failed"), ("L2", "failed")])
    first, second = RunFolder.find_all(root)
    assert [run.config.owner() for run in (first, second)] == [FIRST, SECOND]
    assert [run.result.owner() for run in (first, second)] == [SECOND, SECOND]
    rewritten = as_user(FIRST, GROUP, lambda: write_result(second, config).status, umask)
    assert (rewritten, second.result.owner()) == ("failed", FIRST)
    as_user(FIRST, GROUP, lambda: append(second.events(0), RunEnded(time=2.0, status="failed", reason="late")), umask)
    assert "late" in second.events(0).read_text()


def test_folder_that_is_in_use_is_shared_later(root, config):
    assert as_user(FIRST, GROUP, lambda: run_once(root, config)) == "L1"
    (run,) = RunFolder.find_all(root)
    run.write_job_script("#!/bin/bash\n", private=True)
    as_user(FIRST, GROUP, lambda: share_folder(root, GROUP))
    assert run.job_script.stat().st_mode & 0o777 == 0o700
    assert as_user(SECOND, GROUP, lambda: run_once(root, config)) == "L2"
    assert as_user(SECOND, GROUP, lambda: finish_all(root)) == str([("L1", "failed"), ("L2", "failed")])


def test_folder_of_another_user_is_refused_in_one_line(root, config):
    assert as_user(FIRST, None, lambda: run_once(root, config)) == "L1"
    hint = f"belongs to {FIRST}, group {FIRST} may not write there; share it by llmb-install --shared GROUP, or choose"
    for action in (
        lambda: run_once(root, config),
        lambda: make_folder(root / "new"),
        lambda: Store(store_path(root)).add(config, root),
        lambda: Store(store_path(root / "workloads")).add(config, root),
    ):
        refusal = as_user(SECOND, GROUP, action)
        assert hint in refusal
        assert "Error: " in refusal
        assert "\n" not in refusal
    # What is there can be read.
    assert as_user(SECOND, None, lambda: [job.job_id for job in Store(store_path(root)).jobs()]) == str(["L1"])


def test_runs_of_others_are_left_to_them(root, config):
    as_user(FIRST, GROUP, lambda: share_folder(root, GROUP))
    as_user(FIRST, GROUP, lambda: run_once(root, config))
    (run,) = RunFolder.find_all(root)
    with Store(store_path(root)) as store:
        store.note("L1", status="failed", retries=2)

    def retried() -> list[str]:
        with Store(store_path(root)) as store:
            return [job.job_id for job in own_jobs_to_retry(store)]

    assert as_user(FIRST, GROUP, retried) == str(["L1"])
    assert as_user(SECOND, GROUP, retried) == str([])
    assert as_user(FIRST, GROUP, lambda: may_still_appear(run, 0.0)) == "False"
    assert as_user(SECOND, GROUP, lambda: may_still_appear(run, 0.0)) == "True"  # Slurm tells them nothing of it
    run.pid_file.unlink()
    write_pid_file(run, 1)
    with Store(store_path(root)) as store:
        job = store.job("L1")
    assert (
        as_user(SECOND, GROUP, lambda: _cancel_local(job))
        == f"ConfigError: belongs to {FIRST}, who alone can cancel it"
    )


def test_sharing_with_a_foreign_or_unknown_group_is_refused(root):
    with pytest.raises(ConfigError, match="no group 'no-such-group'; you are in: "):
        share_folder(root, "no-such-group")
    assert not root.exists()
    refusal = as_user(FIRST, None, lambda: share_folder(root, GROUP))
    assert (
        refusal
        == f"ConfigError: cannot share {root} with group users: Operation not permitted; you are not in this group"
    )
    as_user(FIRST, GROUP, lambda: share_folder(root, GROUP))
    refusal = as_user(SECOND, GROUP, lambda: share_folder(root, GROUP))
    assert refusal.endswith(f"it belongs to {FIRST}, who can")


def test_without_acls_the_umask_is_named(root, monkeypatch):
    def unsupported(*_arguments: object) -> None:
        raise OSError("no ACLs")

    monkeypatch.setattr(os, "setxattr", unsupported)
    assert share_folder(root, GROUP)[1:] == ["this file system has no default ACLs: each member also needs umask 002"]
    assert root.stat().st_mode & stat.S_ISGID


def test_link_planted_by_another_user_is_not_followed(root, config):
    as_user(FIRST, GROUP, lambda: share_folder(root, GROUP))
    as_user(FIRST, GROUP, lambda: run_once(root, config))
    (run,) = RunFolder.find_all(root)
    private = root.parent / "private"
    private.write_text("mine")
    shutil.chown(private, FIRST)
    private.chmod(0o600)

    def plant() -> None:
        for path in (run.result, run.events(0), run.log):
            path.unlink(missing_ok=True)
            path.symlink_to(private)

    as_user(SECOND, GROUP, plant)
    for action in (
        lambda: write_atomic(run.result, "{}"),
        lambda: append(run.events(0), RunEnded(time=1.0, status="ok")),
        lambda: append_run_end(run.events(0), RunEnded(time=1.0, status="ok")),
        lambda: EngineLog(run.log, ())._write(b"text"),
        lambda: run.add_to_log("text"),
    ):
        as_user(FIRST, GROUP, action)
    assert private.read_text() == "mine"
    assert not run.result.is_symlink()
