"""bench/serve_clients.py runs with our own client, on the engine and on the no-op server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.nightly  # tests/bench/test_serve_http.py runs the same server and client
def test_tiny_run_measures_by_our_client(tmp_path):
    out = tmp_path / "results.json"
    cores = ["--server-core", "", "--client-core", ""]
    command = [
        sys.executable,
        str(BENCH / "serve_clients.py"),
        "--tiny",
        "--clients",
        "llmb",
        "--json",
        str(out),
        *cores,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    for part in ("engine", "schedule", "ceiling"):
        for run in (run for by in report[part]["runs"].values() for runs in by.values() for run in runs):
            assert run["failed"] == 0
            assert run["output_tokens"] == run["completed"] * (128 if part == "ceiling" else 16)
            assert run["own_output_tokens"] == run["output_tokens"] or part != "engine"


def test_clients_that_are_not_installed_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMB_VLLM_VENV", str(tmp_path))
    command = [sys.executable, str(BENCH / "serve_clients.py"), "--clients", "llmb,vllm"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "not installed: vllm; run `make peers`" in result.stderr
