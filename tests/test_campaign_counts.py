"""Counts of campaigns: recorded by test, added up by campaign, and never written by hand."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from campaign_counts import counts_file, record_campaigns

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
campaigns = import_module("campaigns")


def report_of(nodeid: str, cases: int, outcome: str) -> pytest.TestReport:
    properties = [("campaign kills", cases), ("unrelated", 1)]
    location = ("test_a.py", 1, "test")
    return pytest.TestReport(nodeid, location, {}, outcome, None, "call", user_properties=properties)


def test_the_last_run_of_each_test_counts(tmp_path):
    path = tmp_path / "counts.json"
    for report in (
        report_of("test_a.py::test[1]", 7, "failed"),
        report_of("test_a.py::test[1]", 8, "passed"),
        report_of("test_a.py::test[2]", 1000, "failed"),
    ):
        record_campaigns(path, report)
    counts = json.loads(path.read_text())
    assert list(counts) == ["kills"]
    assert campaigns.table(counts).splitlines()[2].startswith("| kills | 1,008 | 8 | `test_a.py` | 20")


def test_one_process_records_the_reports_of_all_workers():
    recording = {"LLMB_CAMPAIGN_COUNTS": "counts.json"}
    assert counts_file({}) is None
    assert counts_file(recording) == Path("counts.json")
    assert counts_file(recording | {"PYTEST_XDIST_WORKER": "gw1"}) is None


@pytest.mark.skipif("LLMB_CAMPAIGN_COUNTS" in os.environ, reason="counts are being recorded; the table is written last")
def test_the_table_is_that_of_the_recorded_counts():
    page, counts = campaigns.PAGE.read_text(), json.loads(campaigns.COUNTS.read_text())
    assert campaigns.with_table(page, counts) == page
