"""Run folder: its layout, its lock, and installations with unusual paths."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from llmb.cli.jobs.job_outcome import read_job_outcome
from llmb.config.serialization import write_atomic
from llmb.config.spec import Override
from llmb.errors import ConfigError, LaunchError
from llmb.launch.install_root import install_root
from llmb.launch.run_files.pid_file import is_alive, write_pid_file
from llmb.launch.run_folder import RunFolder, store_path
from llmb.launch.run_lock import exclusive_run_lock
from llmb.launch.slurm.submission import read_submission

NOON = datetime(2026, 1, 2, 12, 0, 0)
HOSTILE = [
    "with space",
    "quote'and\"double",
    "line\nbreak",
    "$(touch pwned)`x`",
    "-dash",
    "*?[a]",
    "caf\u00e9",
    "not utf-8 \udcff",
    "%s {x}",
]


def test_layout(tmp_path, config):
    run = RunFolder.create(tmp_path, config, NOON)
    name = config.name
    assert run.path == tmp_path / "workloads/pretrain_tiny/experiments" / name / f"{name}_20260102-120000" / name
    paths = (
        run.config,
        run.job_script,
        run.events(3),
        run.log,
        run.result,
        run.record("L7"),
        run.profile,
        run.pid_file,
    )
    assert [path.name for path in paths] == [
        "config.json", "job.sh", "events.rank3.jsonl", f"log-{name}.out", "result.json", "llmb-config_L7.yaml",
        "profile", "pid",
    ]  # fmt: skip
    assert all(path.parent == run.path for path in paths)
    assert store_path(tmp_path) == tmp_path / ".llmb/jobs.sqlite3"
    assert run.read_config() == config
    assert RunFolder.open(run.path) == run
    assert datetime.fromtimestamp(run.created_at) == NOON


def test_existing_folder_is_never_reused(tmp_path, config):
    runs = [RunFolder.create(tmp_path, config, NOON) for _ in range(3)]
    assert [run.path.parent.name.rpartition("_")[2] for run in runs] == ["20260102-120000", "2", "3"]
    assert {run.created_at for run in runs} == {NOON.timestamp()}
    assert list(RunFolder.find_all(tmp_path)) == runs


def test_time_stamps_are_local_time(tmp_path, config):
    utc = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
    assert RunFolder.create(tmp_path, config, utc).created_at == utc.timestamp()


def test_find_all_ignores_other_folders(tmp_path, config):
    assert list(RunFolder.find_all(tmp_path / "nothing")) == []
    run = RunFolder.create(tmp_path, config, NOON)
    second = RunFolder.create(tmp_path, replace(config, target="inference_x", name="y"), NOON)
    (run.path.parent.parent / "notes").mkdir()
    (run.path.parent / "empty").mkdir()
    (tmp_path / "workloads" / "stray.txt").touch()
    assert list(RunFolder.find_all(tmp_path)) == [second, run]


def test_open_refuses_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run folder: it holds no config\.json"):
        RunFolder.open(tmp_path)


def test_config_json_holds_no_secret(tmp_path, config):
    environment = {"HF_TOKEN": "abcdefgh", "TP_HINT": "2", "X": "hf_" + "z" * 30}
    run = RunFolder.create(tmp_path, replace(config, environment=environment), NOON)
    assert run.read_config().environment == {"HF_TOKEN": "***", "TP_HINT": "2", "X": "***"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_installation_may_have_any_name(tmp_path, config, hostile):
    install = install_root({"LLMB_INSTALL": str(tmp_path / hostile)})
    run = RunFolder.create(install, config, NOON)
    run.write_record(config, "L1")
    assert install == tmp_path / hostile
    assert run.read_config() == config
    assert list(RunFolder.find_all(install)) == [run]
    assert yaml.safe_load(run.record("L1").read_text())["cluster_info"]["llmb_install"] == str(install)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\nb", "x" * 201, "\u00e9" * 101])
def test_name_that_cannot_be_a_folder_is_refused(tmp_path, config, name):
    with pytest.raises(ConfigError, match=r"name .*folder"):
        RunFolder.create(tmp_path, replace(config, name=name), NOON)
    assert list(tmp_path.iterdir()) == []


def test_longest_name_fits(tmp_path, config):
    run = RunFolder.create(tmp_path, replace(config, name="x" * 200), NOON)
    write_atomic(run.log, "")
    assert run.log.exists()


def test_install_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert install_root({}) == install_root({"LLMB_INSTALL": ""}) == tmp_path / ".llmb"
    assert install_root({"LLMB_INSTALL": "~/x"}) == tmp_path / "x"
    with pytest.raises(ConfigError, match="LLMB_INSTALL is too long"):
        install_root({"LLMB_INSTALL": "x" * 5000})
    monkeypatch.chdir(tmp_path)
    assert install_root({"LLMB_INSTALL": "here"}) == tmp_path / "here"


@pytest.mark.parametrize(
    "make", [lambda i, c: RunFolder.create(i, c, NOON), lambda i, c: exclusive_run_lock(i, c).__enter__()]
)
def test_unwritable_folder_is_refused_with_a_hint(tmp_path, config, make):
    (tmp_path / "a\nfile").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*Not a directory; .*LLMB_INSTALL=") as refused:
        make(tmp_path / "a\nfile", config)
    assert "\n" not in str(refused.value)


def full_disk(tmp_path: Path, size_kib: int) -> Path:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k,nr_inodes=12", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    return disk


def test_full_disk_is_a_launch_error(tmp_path, config):
    disk = full_disk(tmp_path, size_kib=8)
    try:
        RunFolder.create(disk, config, NOON)
        (disk / "fill").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
        with pytest.raises(LaunchError, match="No space left on device") as no_blocks:
            RunFolder.create(disk, config, NOON)
        with pytest.raises(LaunchError, match="No space left on device; free some space") as no_inodes:
            [RunFolder.create(disk, config, NOON) for _ in range(9)]
        assert no_blocks.value.exit_code == no_inodes.value.exit_code == 2
        assert len(list(RunFolder.find_all(disk))) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_pid_file_tells_live_from_dead_processes(run_folder):
    assert is_alive(run_folder) is False
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_pid_file(run_folder, child.pid)
    assert is_alive(run_folder) is True
    content = run_folder.pid_file.read_text()
    run_folder.pid_file.write_text(content.replace('"started": ', '"started": 1'))  # the pid was reused
    assert is_alive(run_folder) is False
    run_folder.pid_file.write_text(content.replace(socket.gethostname(), "another-host"))
    assert is_alive(run_folder) is None
    run_folder.pid_file.write_text("12")
    assert is_alive(run_folder) is False
    run_folder.pid_file.write_text(content)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(run_folder) is False  # a zombie is dead
    child.communicate()


def test_job_record(tmp_path, config):
    config = replace(
        config,
        environment={"HF_TOKEN": "abcdefgh", "STRONG_SCALING": "true"},
        overrides=(Override(field="window", value=(1, 2), replaced=(35, 44), source="--set"),),
    )
    run = RunFolder.create(tmp_path, config, NOON)
    assert run.job_id is None
    run.write_record(config, "4711", launcher="slurm", slurm_account="me")
    assert run.job_id == "4711"
    text = run.record("4711").read_text()
    data = yaml.safe_load(text)
    assert list(data) == ["job_info", "workload_info", "model_info", "cluster_info", "job_config"]
    assert data["job_info"]["job_id"] == "4711"
    assert data["job_info"]["launch_time"] == "2026-01-02T12:00:00"
    assert data["workload_info"]["workload_type"] == "training"
    assert data["model_info"] == {
        "model_name": "tiny", "model_size": "8b", "dtype": "bf16", "scale": 1, "gpu_type": "cpu",
    }  # fmt: skip
    assert data["cluster_info"]["slurm_account"] == "me"
    assert data["cluster_info"]["cluster_name"] is None
    assert data["job_config"]["env_overrides"] == {"HF_TOKEN": "***", "STRONG_SCALING": "true"}
    assert data["job_config"]["model_overrides"] == {"window": [1, 2]}
    assert "abcdefgh" not in text


def test_experiment_id(config):
    from llmb.launch.run_files.job_record import experiment_id

    assert experiment_id(config) == experiment_id(replace(config, environment={"A": "b"}))
    assert experiment_id(config) != experiment_id(replace(config, size="70b"))


def test_lock_is_per_experiment_and_released_by_its_holder(tmp_path, config):
    with exclusive_run_lock(tmp_path, config):
        with (
            pytest.raises(ConfigError, match="is already running; wait for it or stop it"),
            exclusive_run_lock(tmp_path, config),
        ):
            pass
        with exclusive_run_lock(tmp_path, replace(config, name="another")):
            pass
    with exclusive_run_lock(tmp_path, config):
        pass


def test_submission_with_the_old_field_name_opens(run_folder):
    run_folder.submission.write_text('{"token": "llmb:1", "wishes": {"nice": 5}}')
    assert read_submission(run_folder).sbatch_overrides == {"nice": 5}


def test_job_outcome_with_the_old_field_name_opens(run_folder):
    run_folder.job_outcome.write_text('{"guilty_nodes": ["n2"]}')
    assert read_job_outcome(run_folder).excluded_nodes == ("n2",)
