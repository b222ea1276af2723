"""Index of all runs as text; `test_page_in_chromium.py` sorts and filters it."""

from dataclasses import replace

from page_runs import trained

from llmb.report.page.jobs_index import jobs_index
from llmb.results.job_store import job_row


def test_the_index_marks_what_a_figure_must_not_be_taken_for(recipes, tmp_path):
    config = trained(recipes).config
    job = job_row(config, tmp_path, "local", "L1", 1e9, status="ok", step_time_s=4.2)
    rows = [job, replace(job, job_id="L2", proxy="4 of 32 layers", settings="one-rank=3 steps=4")]
    page = jobs_index([(row, None) for row in rows])
    assert f">{job.workload}</td>" in page
    assert f">{job.workload}*+</td>" in page
    assert "+ is one rank of a layout" in page
    assert "one-rank=3 steps=4</td>" in page  # settings tell the runs of one workload apart
    assert ">s/step</th>" in page
    assert ">TTFT ms</th>" not in page  # a column that no run has a figure for
