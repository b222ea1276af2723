"""`llmb-run sweep -w`: a server that the sweep starts, and the engine without one, on a small proxy."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

ENGINE = ["-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1", "--proxy", "--point-seconds", "1"]
CLIENT = ["--no-calibrate", "--processes", "1"]


def start(install, *arguments):
    environment = {**os.environ, "LLMB_INSTALL": str(install)}
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "sweep", *arguments, "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode in (0, 2), err  # 2: the client was late in every point, on a busy machine
    return json.loads(out.splitlines()[-1])


def processes_of(install):
    """Return the processes whose command or environment names this installation."""
    ids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as environ:
                    if f"LLMB_INSTALL={install}".encode() in environ.read().split(b"\0"):
                        ids.append(int(entry))
            except OSError:
                continue
    return ids


@pytest.mark.nightly  # others kill and resume sweeps of one server
def test_a_sweep_of_two_servers_is_killed_and_resumes(tmp_path):
    """No server survives, no finished point is lost, and each variant has a server of its own."""
    process = start(tmp_path, *ENGINE, *CLIENT, "--concurrency", "1..2", "--set", "max_num_tokens=64,128")
    points = None
    while points is None or not points.read_text().count("\n"):
        time.sleep(0.05)
        points = next((tmp_path / "sweeps").glob("*/points.jsonl"), None) if (tmp_path / "sweeps").exists() else None
        assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = points.read_text().splitlines()[0]
    deadline = time.monotonic() + 60
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []
    result = finish(start(tmp_path, "--resume", points.parent.name))
    assert points.read_text().splitlines()[0] == first
    rows = [(row["variant"], row["load"]) for row in result["rows"]]
    assert rows == [(f"max_num_tokens={tokens}", load) for tokens in (64, 128) for load in (1, 2)]
    log = (points.parent / "server.log").read_text()
    assert len(re.findall(r"serving sweep at", log)) == 3  # one was killed
    assert result["gpus"] == 1
    for row in result["rows"]:
        assert row["requests_failed"] == 0
        assert row["output_tokens_per_s"] > 0
    assert processes_of(tmp_path) == []


def test_the_engine_is_swept_without_a_server(tmp_path):
    result = finish(start(tmp_path, *ENGINE, "--in-process", "--concurrency", "2", "--repeats", "2"))
    assert [(row["load"], row["repeats"]) for row in result["rows"]] == [(2, 2)]
    assert all(row["noise"]["n"] == 2 for row in result["rows"])
    environment = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "jobs"]
    jobs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert jobs.count("concurrency=2") == 2
    assert "TPOT ms" in jobs
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert sorted(path.name for path in (folder / "points" / "concurrency2_r2").iterdir()) == [
        "config.json",
        "events.rank0.jsonl",
    ]


@pytest.mark.nightly  # rates are swept over HTTP by test_sweep_command.py, and the engine with a concurrency above
def test_the_engine_is_swept_over_rates(tmp_path):
    result = finish(start(tmp_path, *ENGINE, "--in-process", "--rate", "4"))
    (row,) = result["rows"]
    assert (row["load_kind"], row["load"], row["requests"]) == ("rate", 4, 16)
