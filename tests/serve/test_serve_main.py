"""`python -m llmb.serve config.json` as a user or Slurm starts it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from small_serving import Served, write_config


def start(config, *interpreter: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *interpreter, "-m", "llmb.serve", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, "incomplete"), pytest.param(signal.SIGUSR1, "timeout", marks=pytest.mark.nightly)],
)
def test_interrupted_run_records_the_signal(tmp_path, number: signal.Signals, status: str) -> None:
    config = write_config(tmp_path / "run", num_requests=10**5)
    process, done = start(config), Served(tmp_path / "run")
    deadline = time.monotonic() + 60
    while not done.requests() or not done.samples():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    ended = done.ended()
    assert ended.status == status
    assert ended.reason.startswith(f"interrupted by {number.name} after ")
    assert ended.reason.endswith(" of 100000 requests")
    assert err == f"llmb.serve: {ended.reason}\n"


def test_invalid_config_is_one_line_and_needs_no_torch(tmp_path) -> None:
    config = write_config(tmp_path / "run")
    config.write_text(config.read_text().replace('"isl"', '"ils"'))
    _, err = (process := start(config, "-X", "importtime")).communicate(timeout=60)
    lines = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 1
    assert len(lines) == 1
    assert "unknown field in config.json.workload: 'ils' (did you mean isl?)" in lines[0]
    assert "torch" not in err
