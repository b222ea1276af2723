"""The run folder: its layout, its exclusiveness, and installations in odd places."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from llmb.config.serialization import write_whole
from llmb.config.spec import Override
from llmb.errors import ConfigError, LaunchError
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunDir, is_alive, mark_alive, store_path
from llmb.launch.run_lock import running_alone

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
    run = RunDir.create(tmp_path, config, NOON)
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
    assert RunDir.open(run.path) == run
    assert datetime.fromtimestamp(run.created_at) == NOON


def test_a_taken_folder_is_never_reused(tmp_path, config):
    runs = [RunDir.create(tmp_path, config, NOON) for _ in range(3)]
    assert [run.path.parent.name.rpartition("_")[2] for run in runs] == ["20260102-120000", "2", "3"]
    assert {run.created_at for run in runs} == {NOON.timestamp()}
    assert list(RunDir.find_all(tmp_path)) == runs


def test_time_stamps_are_local_time(tmp_path, config):
    utc = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
    assert RunDir.create(tmp_path, config, utc).created_at == utc.timestamp()


def test_find_all_passes_over_what_is_no_run(tmp_path, config):
    assert list(RunDir.find_all(tmp_path / "nothing")) == []
    run = RunDir.create(tmp_path, config, NOON)
    other = RunDir.create(tmp_path, replace(config, target="inference_x", name="y"), NOON)
    (run.path.parent.parent / "notes").mkdir()
    (run.path.parent / "empty").mkdir()
    (tmp_path / "workloads" / "stray.txt").touch()
    assert list(RunDir.find_all(tmp_path)) == [other, run]


def test_open_refuses_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run folder: it holds no config\.json"):
        RunDir.open(tmp_path)


def test_config_json_holds_no_secret(tmp_path, config):
    environment = {"HF_TOKEN": "abcdefgh", "TP_HINT": "2", "X": "hf_" + "z" * 30}
    run = RunDir.create(tmp_path, replace(config, environment=environment), NOON)
    assert run.read_config().environment == {"HF_TOKEN": "***", "TP_HINT": "2", "X": "***"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_installation_may_have_any_name(tmp_path, config, hostile):
    install = install_root({"LLMB_INSTALL": str(tmp_path / hostile)})
    run = RunDir.create(install, config, NOON)
    run.write_record(config, "L1")
    assert install == tmp_path / hostile
    assert run.read_config() == config
    assert list(RunDir.find_all(install)) == [run]
    assert yaml.safe_load(run.record("L1").read_text())["cluster_info"]["llmb_install"] == str(install)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\nb", "x" * 201, "\u00e9" * 101])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, config, name):
    with pytest.raises(ConfigError, match=r"name .*folder"):
        RunDir.create(tmp_path, replace(config, name=name), NOON)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_fits(tmp_path, config):
    run = RunDir.create(tmp_path, replace(config, name="x" * 200), NOON)
    write_whole(run.log, "")
    assert run.log.exists()


def test_install_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert install_root({}) == install_root({"LLMB_INSTALL": ""}) == tmp_path / ".llmb"
    assert install_root({"LLMB_INSTALL": "~/x"}) == tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    assert install_root({"LLMB_INSTALL": "here"}) == tmp_path / "here"


@pytest.mark.parametrize("make", [lambda i, c: RunDir.create(i, c, NOON), lambda i, c: running_alone(i, c).__enter__()])
def test_an_unwritable_folder_is_one_line_with_the_way_out(tmp_path, config, make):
    (tmp_path / "a\nfile").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*Not a directory; .*LLMB_INSTALL=") as refused:
        make(tmp_path / "a\nfile", config)
    assert "\n" not in str(refused.value)


def full_disk(tmp_path: Path, room_kib: int) -> Path:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room_kib}k,nr_inodes=12", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    return disk


def test_a_full_disk_is_a_launch_error(tmp_path, config):
    disk = full_disk(tmp_path, room_kib=8)
    try:
        RunDir.create(disk, config, NOON)
        (disk / "fill").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
        with pytest.raises(LaunchError, match="No space left on device") as no_blocks:
            RunDir.create(disk, config, NOON)
        with pytest.raises(LaunchError, match="No space left on device; make room") as no_inodes:
            [RunDir.create(disk, config, NOON) for _ in range(9)]
        assert no_blocks.value.exit_code == no_inodes.value.exit_code == 2
        assert len(list(RunDir.find_all(disk))) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_marker_tells_the_living_from_the_dead(rundir):
    assert is_alive(rundir) is False
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark_alive(rundir, child.pid)
    assert is_alive(rundir) is True
    marker = rundir.pid_file.read_text()
    rundir.pid_file.write_text(marker.replace('"started": ', '"started": 1'))  # the pid was given to another process
    assert is_alive(rundir) is False
    rundir.pid_file.write_text(marker.replace(socket.gethostname(), "another-host"))
    assert is_alive(rundir) is None
    rundir.pid_file.write_text("12")
    assert is_alive(rundir) is False
    rundir.pid_file.write_text(marker)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(rundir) is False  # a zombie is dead
    child.communicate()


def test_the_record_of_a_job(tmp_path, config):
    config = replace(
        config,
        environment={"HF_TOKEN": "abcdefgh", "STRONG_SCALING": "true"},
        overrides=(Override(field="window", value=(1, 2), replaced=(35, 44), source="--set"),),
    )
    run = RunDir.create(tmp_path, config, NOON)
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


def test_an_experiment_id_names_what_is_measured(config):
    from llmb.launch.job_record import experiment_id

    assert experiment_id(config) == experiment_id(replace(config, environment={"A": "b"}))
    assert experiment_id(config) != experiment_id(replace(config, size="70b"))


def test_the_lock_is_for_one_experiment_and_ends_with_its_holder(tmp_path, config):
    with running_alone(tmp_path, config):
        with (
            pytest.raises(ConfigError, match="is already running; wait for it or stop it"),
            running_alone(tmp_path, config),
        ):
            pass
        with running_alone(tmp_path, replace(config, name="another")):
            pass
    with running_alone(tmp_path, config):
        pass
