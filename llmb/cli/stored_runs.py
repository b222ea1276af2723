"""What several commands do with run folders: load one, keep its result."""

from llmb.cli.profile_pictures import draw_profile
from llmb.config.serialization import build, read_json, to_json, write_whole
from llmb.config.spec import RunConfig
from llmb.events import Event, RunEnded, read_all
from llmb.launch.run_folder import RunDir
from llmb.results.derive import derive
from llmb.results.readers.nccl_log import tally
from llmb.results.readers.reader_choice import read_log
from llmb.results.result import Result


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
    if run.lanes.exists():
        draw_profile(run, config)
    return result


def _events(run: RunDir, config: RunConfig) -> list[Event]:
    """What a run told of itself. Another engine writes no events: its log does, and llmb-run's word on its end.

    Of the two ends the log's counts, unless llmb-run stopped the run or the log does not say.
    """
    ours = list(read_all(run.all_events()))
    if not run.log.exists():
        return ours
    if config.profile.nccl_trace:
        ours = [*tally(run.log).events(), *ours]  # NCCL writes its trace into the log, whatever the engine
    if config.engine == "native":
        return ours
    theirs = list(read_log(run.log, config.engine))
    stopped = any(isinstance(event, RunEnded) and event.status in ("timeout", "incomplete") for event in ours)
    unsaid = any(isinstance(event, RunEnded) and event.status == "incomplete" for event in theirs)
    return [*theirs, *ours] if stopped or unsaid else [*ours, *theirs]
