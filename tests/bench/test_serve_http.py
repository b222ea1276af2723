"""bench/serve_http.py runs, and its client counts every token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.nightly
def test_tiny_run_compares_in_process_and_http(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, str(BENCH / "serve_http.py"), "--tiny", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "over HTTP" in result.stdout
    figures = json.loads(out.read_text())
    assert figures["chunks"]["chunks"] == 8 * 40
    row = figures["fp32 8/24"]
    for runs in (row["in_process"], row["http"]):
        assert [run["requests"] for run in (*runs["closed"], runs["open"])] == [24, 24]
        assert runs["open"]["chunks"] == runs["closed"][0]["chunks"] > 24 * 12
