"""The Slurm lab itself: jobs run on it, its nodes fail like real ones, and no process outlives its owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lab_processes
import lab_registry
import pytest
import slurm_lab
from slurm_lab import SlurmLab

from llmb.launch.slurm.job_states import ENDED_STATES

pytestmark = pytest.mark.slurm


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)
    return value


def state(lab, job):
    return lab.call("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()


def end_state(lab, job):
    job_state = state(lab, job)
    return job_state if job_state in ENDED_STATES else None


def submit(lab, tmp_path, command, *arguments):
    return lab.call("sbatch", "--parsable", f"--output={tmp_path}/%j.out", *arguments, f"--wrap={command}").strip()


def test_job_resolves_its_nodes_and_sees_its_gpus(slurm, tmp_path):
    script = "getent hosts $SLURMD_NODENAME; echo $CUDA_VISIBLE_DEVICES"
    out = slurm.call("srun", "--nodelist=n[1-2]", "--gpus-per-node=4", "bash", "-c", script)
    assert set(out.split()) == {"127.0.0.1", "n1", "n2", "0,1,2,3"}


def test_crashed_node_kills_its_tasks(slurm, tmp_path):
    job = submit(slurm, tmp_path, f"touch {tmp_path}/began; sleep 311", "--no-requeue", "--nodelist=n3")
    until((tmp_path / "began").exists)
    slurm.crash_node("n3")
    assert not [
        pid for pid, environ in lab_processes.lab_processes_of(slurm.folder) if b"SLURMD_NODENAME=n3" in environ
    ]
    slurm.down("n3")  # Slurm itself would need half a minute to notice
    assert until(lambda: end_state(slurm, job)) == "NODE_FAIL"


def test_node_set_down_fails_its_job_and_heals(slurm, tmp_path):
    job = submit(slurm, tmp_path, "sleep 60", "--no-requeue", "--nodelist=n2")
    until(lambda: state(slurm, job) == "RUNNING")
    slurm.down("n2")
    until(lambda: state(slurm, job) == "NODE_FAIL")
    slurm.heal()
    assert slurm.call("srun", "--nodelist=n2", "echo", "back").strip() == "back"


def test_jobs_survive_a_killed_controller(slurm, tmp_path):
    job = submit(slurm, tmp_path, f"touch {tmp_path}/began; until [ -e {tmp_path}/end ]; do sleep 0.1; done")
    until((tmp_path / "began").exists)  # by then it is running for the controller too
    slurm.wait_until_saved(job)
    slurm.kill_controller()
    slurm.start_controller()
    assert state(slurm, job) == "RUNNING"
    (tmp_path / "end").touch()
    until(lambda: state(slurm, job) == "COMPLETED")


def test_killed_owner_leaves_no_process_and_no_host_name(tmp_path):
    if reason := slurm_lab.unavailable_reason():
        pytest.skip(reason)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout.readline() == "up\n"
    assert "127.0.0.1 n9 " in lab_registry.HOSTS.read_text()
    pids = [int(file.read_text()) for file in (tmp_path / "run").glob("*.pid")]
    assert len(pids) == 11
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until(lambda: not any(lab_processes.is_alive(pid) for pid in pids))
    until(lambda: "127.0.0.1 n9 " not in lab_registry.HOSTS.read_text())


OWNER = """
import sys, time, pathlib
from slurm_lab import SlurmLab

from llmb.launch.slurm.job_states import ENDED_STATES
SlurmLab(pathlib.Path(sys.argv[1]), nodes=9).start()
print("up", flush=True)
time.sleep(100)
"""


def test_two_labs_at_the_same_time(slurm, tmp_path):
    with SlurmLab(tmp_path, nodes=1, gpus=2) as second:
        assert second.call("sinfo", "-h", "-o", "%D %G").split() == ["1", "gpu:2"]
        assert slurm.call("sinfo", "-h", "-o", "%D %G").split() == ["4", "gpu:8"]
    assert "is UP" in slurm.call("scontrol", "ping")


def test_cgroups_enforce_the_memory_limit(tmp_path):
    if reason := slurm_lab.unavailable_reason(cgroup=True):
        pytest.skip(reason)
    with SlurmLab(tmp_path, nodes=1, cgroup=True) as lab:
        command = f"{sys.executable} -c 'bytearray(300 << 20)'"
        job = submit(lab, tmp_path, command, "--mem=50M")
        assert until(lambda: end_state(lab, job)) == "OUT_OF_MEMORY"


def test_accounting_records_jobs(slurm_with_accounting, tmp_path):
    lab = slurm_with_accounting
    job = submit(lab, tmp_path, "exit 3")
    until(lambda: "FAILED" in lab.call("sacct", "-X", "-n", "-j", job, "-o", "State"))
