"""Runs of this installation as rows, as `llmb-run jobs` lists them."""

from llmb.cli.jobs.jobs import open_store
from llmb.cli.jobs.polling import Poller
from llmb.results.job_store import GOING, Job


def runs(limit: int | None = None, *, workload: str | None = None, status: str | None = None) -> list[Job]:
    """Return stored runs, oldest first; with a limit the newest ones. `llmb.load(job)` returns all figures of one.

    >>> [(job.job_id, job.workload, job.status) for job in llmb.runs(limit=1)]
    [('L1', 'pretrain_llama3.1', 'ok')]
    """
    with open_store() as store:
        unfinished = store.jobs(statuses=(*GOING, "lost"))
        if unfinished:
            Poller(store).refresh(unfinished)
        return store.jobs(limit, workloads=_only(workload), statuses=_only(status))


def _only(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)
