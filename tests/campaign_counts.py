"""Counts of the campaigns that `make test-all` runs: one JSON file, from which docs/campaigns.py writes a table.

A test counts its cases by the fixture `campaign`. Each entry is of the test's last run, with its date and commit.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path

import pytest


def counts_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file that this process records in, if any: workers of xdist send their reports to one that does."""
    path = environment.get("LLMB_CAMPAIGN_COUNTS")
    return Path(path) if path and "PYTEST_XDIST_WORKER" not in environment else None


def record_campaigns(path: Path, report: pytest.TestReport) -> None:
    """Add what a test counted to the file, or replace what its last run did."""
    for name, cases in report.user_properties:
        if name.startswith("campaign "):
            counts = json.loads(path.read_text()) if path.exists() else {}
            counts.setdefault(name.removeprefix("campaign "), {})[report.nodeid] = {
                "cases": cases, "passed": report.passed, "date": date.today().isoformat(), "commit": _commit(),
            }  # fmt: skip
            written = path.with_suffix(".new")  # renamed whole: an interrupted run leaves the former counts
            written.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
            os.replace(written, path)


@cache
def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
