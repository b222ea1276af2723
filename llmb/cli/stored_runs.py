"""Loading of run folders and storing of results, shared by several commands."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from sys import intern

from llmb.cli.profile_pictures import draw_profile
from llmb.config.load_settings import config_from_json, load_settings_of
from llmb.config.serialization import build, read_json, to_json, write_atomic
from llmb.config.spec import OutOfCore, RunConfig, Training
from llmb.errors import ConfigError, LaunchError, LlmbError
from llmb.events import Event, RequestDone, RunEnded, read_all
from llmb.launch.run_folder import RunFolder, printable_path
from llmb.perfmodel.garbage_collection import paused_garbage_collection
from llmb.perfmodel.samples.timed_requests import TimedRequest
from llmb.results.derive import derive
from llmb.results.log_window import Window, format_window, named_window
from llmb.results.readers.nccl_log import tally
from llmb.results.readers.reader_choice import read_log
from llmb.results.recorded_events import completed_requests
from llmb.results.request_file import read_request_times
from llmb.results.result import Result
from llmb.results.timed_run import TimedRun, read_timed_log, timed_run


def load_run(run: RunFolder) -> tuple[RunConfig, Result]:
    """Return configuration and result of a run folder; the result of an interrupted run is derived from its events."""
    try:
        config = config_from_json(read_json(run.config), "config.json")
        if run.result.exists():
            return config, build(Result, read_json(run.result), "result.json")
        return config, derive(config, load_events(run, config))
    except LlmbError:
        raise
    except Exception as error:  # values of the right types that make no sense together; -v shows the cause
        raise ConfigError(f"{printable_path(run.path)} is damaged ({type(error).__name__}: {error})") from error


def load_requests(run: RunFolder, config: RunConfig) -> Sequence[TimedRequest]:
    """Return the measured and successful requests of a serving run, without times of tokens; none of other runs."""
    if isinstance(config.workload, Training | OutOfCore):
        return []
    if config.engine == "native" or load_settings_of(config) is not None:
        return read_request_times(run.all_events())
    return completed_requests(load_events(run, config))


def write_result(run: RunFolder, config: RunConfig) -> Result:
    """Derive the result of a finished run and write it beside its events."""
    result = derive(config, load_events(run, config))
    write_atomic(run.result, to_json(result) + "\n")
    if run.stream_timeline.exists():
        draw_profile(run, config)
    return result


def settle_result(run: RunFolder, config: RunConfig, cause: str | None = None) -> Result:
    """Write the result; where the folder cannot be written any more, return what is known, for the table.

    `cause`: why the run ended, if its events do not say it: they may be what could not be written.
    """
    try:
        return write_result(run, config)
    except LaunchError as error:
        result = derive(config, load_events(run, config))
        if cause is not None and result.status == "incomplete":
            result = replace(result, status="failed", reason=cause)
        return unwritten(result, error)


def unwritten(result: Result, error: LaunchError) -> Result:
    """Return a result that could not be written beside its run, with the reason extended by that."""
    return replace(result, reason="; ".join(filter(None, (result.reason, str(error)))))


def read_timed_run(log: Path) -> TimedRun | None:
    """Return the step times of a log, our own or another engine's; None: no training run, or an older start of one."""
    run = RunFolder.of_log(log)
    if run is not None and log.resolve().parent != run.work.resolve():
        return None
    config = _config_of_log(log, run)
    if run is None or config is None:
        return read_timed_log(log)
    return timed_run(log, config, load_events(run, config), run.job_id)


def usual_window(log: Path, log_format: str | None, recipe_windows: Mapping[str, Window]) -> Window:
    """Return the iterations that count: those of the run's configuration, of its recipe, or of the log's format."""
    config = _config_of_log(log, RunFolder.of_log(log))
    if config is not None and hasattr(config.workload, "window"):
        return config.workload.window
    return named_window(log, recipe_windows) or format_window(log_format)


def _config_of_log(log: Path, run: RunFolder | None) -> RunConfig | None:
    """Return the configuration of the run whose log this is; None where there is none, or it is damaged."""
    if run is None or log.resolve() != run.log.resolve():
        return None
    try:
        return run.read_config()
    except ConfigError:
        return None


def load_events(run: RunFolder, config: RunConfig) -> list[Event]:
    """Return the events of a run; those of another engine come from its log and from llmb-run's record of its end.

    Of the two ends the log's counts, unless llmb-run stopped the run or the log has none.
    """
    starts = run.starts if config.limits.max_restarts else [run]  # one continues the other, or starts anew
    with paused_garbage_collection():
        own_events = list(_compact(read_all(path for start in starts for path in start.all_events())))
    if not run.log.exists():
        return own_events
    if config.profile.nccl_trace:
        own_events = [*tally(run.log).events(), *own_events]  # NCCL writes its trace into the log of any engine
    if config.engine == "native" or load_settings_of(config) is not None:
        return own_events
    log_events = list(read_log(run.log, config.engine))
    stopped = any(isinstance(event, RunEnded) and event.status in ("timeout", "incomplete") for event in own_events)
    unknown_end = any(isinstance(event, RunEnded) and event.status == "incomplete" for event in log_events)
    return [*log_events, *own_events] if stopped or unknown_end else [*own_events, *log_events]


def _compact(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events in less memory: a run may have a million requests, each with the times of all its tokens."""
    for event in events:
        if isinstance(event, RequestDone):
            event.token_times = array("d", event.token_times)
            if event.finish is not None:
                event.finish = intern(event.finish)
        yield event
