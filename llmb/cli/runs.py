"""What several commands do with run folders: load one, keep its result, bring the store up to date."""

from pathlib import Path

from llmb.events import Event, RunEnded, read_all
from llmb.launch.rundir import RunDir, is_alive
from llmb.plain import build, read_json, to_json, write_whole
from llmb.results.derive import derive
from llmb.results.readers import read_log
from llmb.results.result import Result
from llmb.results.store import Job, Store
from llmb.spec import RunConfig


def load_run(run: RunDir) -> tuple[RunConfig, Result]:
    """The configuration and result of a run folder; a run that was cut off is derived from its events."""
    config = build(RunConfig, read_json(run.config), "config.json")
    if run.result.exists():
        return config, build(Result, read_json(run.result), "result.json")
    return config, derive(config, _events(run, config))


def keep_result(run: RunDir, config: RunConfig) -> Result:
    """Derive the result of a run that is over and write it beside its events."""
    result = derive(config, _events(run, config))
    write_whole(run.result, to_json(result) + "\n")
    return result


def _events(run: RunDir, config: RunConfig) -> list[Event]:
    """What a run told of itself. Another engine writes no events: its log does, and llmb-run's word on its end.

    Of the two ends the log's counts, unless llmb-run stopped the run or the log does not say.
    """
    ours = list(read_all(run.all_events()))
    if config.engine == "native" or not run.log.exists():
        return ours
    theirs = list(read_log(run.log, config.engine))
    stopped = any(isinstance(event, RunEnded) and event.status in ("timeout", "incomplete") for event in ours)
    unsaid = any(isinstance(event, RunEnded) and event.status == "incomplete" for event in theirs)
    return [*theirs, *ours] if stopped or unsaid else [*ours, *theirs]


def refresh(store: Store, job: Job) -> Job:
    """A job that says it runs: if its process is gone from this host, find out how it ended."""
    run = RunDir.open(Path(job.run_dir))
    if is_alive(run) is not False:
        return job
    config, _ = load_run(run)
    store.finish(job.job_id, keep_result(run, config))
    return store.job(job.job_id)
