"""Limits and OOM kills of memory cgroups, of both versions; the kernel's OOM killer itself where one can be made."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmb.launch import local_machine, memory_cgroup
from llmb.launch.failure import diagnose_run

GIB = 1 << 30
STATES = "anon 1\ninactive_file 4096\ntotal_inactive_file 4096\n"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Empty trees of cgroups; returns their root."""
    monkeypatch.setattr(memory_cgroup, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(memory_cgroup, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_cgroup, "VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 5\n")
    return tmp_path / "cgroup"


def test_version_2(cgroups, tmp_path):
    (tmp_path / "own").write_text("0::/job/step\n")
    write(cgroups / "job", max=f"{8 * GIB}\n", current=f"{GIB}\n", stat=STATES, events="oom 3\noom_kill 2\n")
    write(cgroups / "job" / "step", max="max\n", current="1\n", stat=STATES, events="oom 0\noom_kill 0\n")
    assert memory_cgroup.memory_limits() == [memory_cgroup.MemoryLimit(8 * GIB, GIB - 4096)]
    assert memory_cgroup.oom_kills() == {"this machine": 5, "cgroup step": 0, "cgroup job": 2}


def test_version_1(cgroups, tmp_path):
    (tmp_path / "own").write_text("9:cpu:/job\n4:memory:/job\n0::/\n")
    usage = {"usage_in_bytes": "4096\n", "stat": STATES, "oom_control": "oom_kill_disable 0\noom_kill 1\n"}
    write(cgroups / "memory", limit_in_bytes="9223372036854771712\n", **usage)
    (cgroups / "memory" / "job").mkdir()
    for name, text in {"limit_in_bytes": f"{2 * GIB}\n", **usage}.items():
        (cgroups / "memory" / "job" / f"memory.{name}").write_text(text)
    assert [limit.free for limit in memory_cgroup.memory_limits()] == [2 * GIB]
    assert memory_cgroup.oom_kills()["cgroup job"] == 1


def test_peak_of_the_smallest_limit_is_known(cgroups, tmp_path):
    (tmp_path / "own").write_text("0::/job/step\n")
    write(cgroups / "job", max=f"{8 * GIB}\n", peak=f"{6 * GIB}\n")
    write(cgroups / "job" / "step", max=f"{2 * GIB}\n", peak=f"{2 * GIB}\n")
    assert memory_cgroup.peak_usage() == "cgroup step: peak 2.00 GiB, limit 2.00 GiB"
    (cgroups / "job" / "step" / "memory.peak").unlink()  # an older kernel
    (cgroups / "job" / "memory.max").write_text("max\n")
    assert memory_cgroup.peak_usage() is None


def test_available_memory_is_what_the_smallest_limit_leaves(cgroups, tmp_path):
    (tmp_path / "own").write_text("0::/\n")
    assert 0 < local_machine.available_memory_bytes() <= local_machine.host_memory_bytes()
    write(cgroups, max="1048576\n", current="1000000\n", stat="")
    assert local_machine.available_memory_bytes() == 48576


def test_machine_without_cgroups(cgroups):
    assert memory_cgroup.memory_limits() == []
    assert memory_cgroup.oom_kills() == {"this machine": 5}


@pytest.fixture
def small_cgroup():
    """Memory cgroup of 64 MiB below that of this process; skips where none can be made."""
    parent = next((folder for folder, is_v2 in memory_cgroup._memory_folders() if not is_v2), None)
    folder = (parent or Path("/nowhere")) / f"llmb-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError:
        pytest.skip("no memory cgroup can be made here")
    yield folder
    folder.rmdir()


def test_kernel_counts_the_process_that_it_kills(small_cgroup):
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('0'); x = b'1' * (256 << 20)"
    before = memory_cgroup.oom_kills()
    process = subprocess.run([sys.executable, "-c", program, str(small_cgroup / "cgroup.procs")])
    assert process.returncode == -signal.SIGKILL
    after = memory_cgroup.oom_kills()
    assert after["this machine"] > before["this machine"]


def test_run_whose_rank_the_kernel_kills_ends_oom(small_cgroup, launch):
    run = launch(f"""
        write(RunStarted(time=time.time()))
        Path({str(small_cgroup / "cgroup.procs")!r}).write_text("0")
        x = b"1" * (256 << 20)
    """)
    assert (run.outcome.status, run.outcome.failed_rank) == ("oom", 0)
    assert run.outcome.reason is not None
    assert run.outcome.reason.startswith("rank 0: killed by the kernel's OOM killer, which ended ")
    failure = diagnose_run(run.run_folder, None)
    assert failure is not None
    assert failure.kind == "oom_kill"
