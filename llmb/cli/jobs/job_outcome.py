"""How a Slurm job ended: the result its folder holds, put together with what Slurm says of it.

The run itself writes result.json inside its job. A node that dies takes that with it, and Slurm may know better why a
run broke off (a time limit, a preemption): then the failure is named from all the evidence, and result.json says so.
ending.json keeps Slurm's part beside it, as Slurm forgets, and a store that is made anew must not.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from llmb.cli.stored_runs import keep_result, load_run
from llmb.config.serialization import build, read_json, to_json, write_whole
from llmb.config.spec import RunConfig, Status
from llmb.events import RunEnded
from llmb.launch.event_tail import last_word, record_end
from llmb.launch.failure import Failure, failure_of
from llmb.launch.run_folder import RunDir
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.results.job_store import Job, figures
from llmb.results.result import Result

STATUS_OF: dict[str, Status] = {
    "time_limit": "timeout",
    "oom_kill": "oom",
    "gpu_oom": "oom",
    "cancelled": "incomplete",
    "preemption": "incomplete",
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known of a job's end besides its Result. Null: Slurm did not say, or had forgotten."""

    slurm_state: str | None = None
    nodes: str | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    failure: str | None = None  # its kind; null: none
    retryable: bool = False
    guilty_nodes: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, Any]:
        """What the job's row takes of it; a failure that is not worth it has no retries left."""
        times = {"submitted_at": self.submitted_at, "started_at": self.started_at, "ended_at": self.ended_at}
        known = {"slurm_state": self.slurm_state, "nodes": self.nodes, **times}
        return known if self.retryable else {**known, "retries": 0}


def has_end(run: RunDir) -> bool:
    """Whether the folder says how the run ended."""
    return run.result.exists() or last_word(run.events(0)) is not None


def settle(run: RunDir, job: Job, state: JobState | None) -> dict[str, Any]:
    """Keep in its folder how a job that is over went; gives what its row takes of it.

    `state`: Slurm's word; none: it has forgotten the job, and the folder knows how it ended.
    """
    config, result = load_run(run)
    if run.all_events():  # ranks may have outlived what watched them, and said more since the result was written
        result = keep_result(run, config)
    failure = failure_of(run, state)
    told = _told(result, failure)
    if told != result or not run.result.exists():
        write_whole(run.result, to_json(told) + "\n")
    ending = Ending(
        slurm_state=state.state if state else None,
        nodes=state.nodes if state and state.nodes else job.nodes,
        submitted_at=state.submitted_at if state and state.submitted_at else job.submitted_at,
        started_at=state.started_at if state and state.started_at else job.started_at,
        ended_at=state.ended_at if state else None,
        failure=failure.kind if failure else None,
        retryable=failure.retryable if failure else False,
        guilty_nodes=failure.guilty_nodes if failure else (),
    )
    _keep(run, ending)
    return {**figures(told), **ending.columns, "refreshed_at": time.time()}


def settle_unsubmitted(run: RunDir, config: RunConfig, reason: str) -> None:
    """Keep in its folder that a job never came to be."""
    record_end(run.events(0), RunEnded(time=time.time(), status="failed", reason=reason))
    keep_result(run, config)
    _keep(run, Ending(failure="refused"))


def read_ending(run: RunDir) -> Ending | None:
    """What was kept; none: the job had not ended when someone last looked."""
    return build(Ending, read_json(run.ending), "ending.json") if run.ending.exists() else None


def _keep(run: RunDir, ending: Ending) -> None:
    write_whole(run.ending, to_json(ending) + "\n")


def _told(result: Result, failure: Failure | None) -> Result:
    """The result with the failure named; a run that broke off without a word has failed."""
    if failure is None:
        return result
    unsaid = result.status in ("ok", "incomplete", "timeout")  # a time limit has its own kind of failure
    status = STATUS_OF.get(failure.kind) or ("failed" if unsaid else result.status)
    return replace(result, status=status, reason=failure.reason)
