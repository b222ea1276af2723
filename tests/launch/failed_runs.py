"""Facts about failed runs: the state of the job, the end of the run and the events of its ranks."""

from llmb.events import RunEnded, RunStarted
from llmb.launch.slurm.slurm_jobs import JobState


def job(state="FAILED", **more):
    facts = {
        "job_id": "7",
        "phase": "ended",
        "state": state,
        "reason": None,
        "exit_code": 1,
        "signal": 0,
        "nodes": "n[1-2]",
        "submitted_at": 1.0,
        "started_at": 2.0,
        "ended_at": 3.0,
        "restarts": 0,
    }
    return JobState(**facts | more)


def failed(reason, rank=None, status="failed", last_lines=()):
    return RunEnded(status=status, reason=reason, failed_rank=rank, last_lines=last_lines)


def ranks(silent=(), hosts=("n1", "n1", "n2", "n2")):
    """Events of ranks that started on these hosts and recorded their end, except the silent ones."""
    started = [RunStarted(time=1.0, rank=rank, host=host) for rank, host in enumerate(hosts)]
    ended = [RunEnded(rank=r, status="incomplete", reason="interrupted") for r in range(len(hosts)) if r not in silent]
    return [*started, *ended]
