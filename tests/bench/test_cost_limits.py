"""Costs that have a limit, measured at full size in CPU seconds, which other programs on the machine change least."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

pytestmark = pytest.mark.nightly


@pytest.fixture
def measured(tmp_path):
    def measure(program: str, *arguments: str) -> dict:
        """Run a benchmark and return what it recorded, by part."""
        recorded = tmp_path / "recorded.json"
        command = [sys.executable, str(BENCH / program), "--json", str(recorded), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(recorded.read_text())

    return measure


def test_ten_thousand_folders_are_rebuilt_in_eight_seconds(measured):
    ((rebuild,),) = measured("many_runs.py", "--runs", "10000", "--samples", "0").values()
    assert rebuild["cpu_s"] < 8.0


@pytest.mark.parametrize("shape", ["chatter", "trace", "steps", "unknown"])
def test_five_gibibytes_of_log_are_read_in_a_minute(measured, shape):
    ((read,),) = measured("read_logs.py", "--gib", "0.5", "--shapes", shape).values()
    assert 10 * read["cpu_s"] < 60.0


def test_checked_load_of_a_checkpoint_costs_little(measured):
    (loads,) = measured("checkpoint_load.py", "--warm", "--wide", "--rounds", "3")["loads"]
    cpu_s = {kind: min(cpu for _, cpu in times) for kind, times in loads["seconds"].items()}
    assert cpu_s["checked"] < 1.05 * cpu_s["torch's reader"]
    assert cpu_s["checked"] < 1.2 * cpu_s["without hashes"]
