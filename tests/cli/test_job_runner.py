"""Job runner of a Slurm job, without Slurm: what the submission asks for reaches the job."""

import os
from datetime import datetime

import pytest

from llmb.cli import job_runner
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.submission import Submission, write_submission


@pytest.mark.parametrize("report", [True, False])
def test_no_report_reaches_the_job(report, recipes, monkeypatch, capsys):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    write_submission(run, Submission(token="llmb:mine", report=report))

    def run_ranks(config, run, *_):
        steps = [StepDone(step=n, seconds=2.0, tokens=1000) for n in range(1, config.workload.steps + 1)]
        for event in (RunStarted(time=1.0), *steps, RunEnded(time=2.0, status="ok")):
            append(run.events(0), event)

    monkeypatch.setattr(job_runner, "run_in_allocation", run_ranks)
    assert job_runner.run_job(run, [], {"SLURM_JOB_ID": "17"}) == 0
    assert run.report_page.exists() is report
    assert ("report: " in capsys.readouterr().out) is report
