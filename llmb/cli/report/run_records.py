"""Run folders read for a page: configuration, result, events, explanation, files."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.cli.explain.run_figures import explain_result
from llmb.cli.profile_pictures import predicted_timeline
from llmb.cli.stored_runs import load_events, load_run
from llmb.config.load_settings import LoadConfig
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import LlmbError
from llmb.events import Event, RequestDone
from llmb.formats.dense_reader import open_dense
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunFolder
from llmb.launch.secrets import scrub_thoroughly
from llmb.perfmodel.explain.explanation import Explanation
from llmb.perfmodel.offload.stream_timeline import read_timeline
from llmb.perfmodel.probe.node_collectives import NodeCollectives, stored_node_collectives
from llmb.perfmodel.probe.probe_record import ProbeRecord, stored_probe
from llmb.report.page.run_record import RunRecord
from llmb.report.timeline.profile_page import timeline_sections
from llmb.results.recorded_events import RecordedEvents
from llmb.results.result import Result

MOST_COMMAND_BYTES = 2**20


def run_record(run: RunFolder, page: Path) -> RunRecord:
    """Read a run for a page at this path."""
    config, result = load_run(run)
    return RunRecord(
        label=run.job_id or run.name,
        config=config,
        result=replace(result, **_without_secrets(result)),
        events=RecordedEvents(map(_scrubbed, load_events(run, config))),
        explanation=_explanation(config, result),
        command=_command(run),
        files=_files(run, page),
        probe=_probe(config, result),
        node_collectives=_node_collectives(config, result),
        timelines=_timelines(run, config),
    )


def _command(run: RunFolder) -> str | None:
    """Return the command line of a run as it was typed; None: not recorded, or it cannot be read."""
    try:
        with open_dense(run.command_line) as file:
            return file.read(MOST_COMMAND_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def _without_secrets(result: Result) -> dict[str, Any]:
    """Return the fields that quote a log or an error, without secrets."""
    lines = tuple(scrub_thoroughly(line) for line in result.last_lines)
    return {"last_lines": lines, "reason": None if result.reason is None else scrub_thoroughly(result.reason)}


def _scrubbed(event: Event) -> Event:
    if isinstance(event, RequestDone) and event.error is not None:
        return replace(event, error=scrub_thoroughly(event.error))
    return event


def _explanation(config: RunConfig, result: Result) -> Explanation | None:
    """Return the limits and terms of a run; None of a failed one."""
    try:
        return explain_result(config, result)
    except LlmbError:
        return None


def _probe(config: RunConfig, result: Result) -> ProbeRecord | None:
    """Return what `llmb-run probe` measured on the machine of a run; None: nothing, or a damaged file."""
    if isinstance(config, LoadConfig):  # the server is elsewhere
        return None
    try:
        return stored_probe(config.launch_machine.gpu, install_root(os.environ), result.host)
    except LlmbError:
        return None


def _node_collectives(config: RunConfig, result: Result) -> NodeCollectives | None:
    """Return what `llmb-run probe --slurm` measured with the host of a run over several nodes; None: nothing."""
    if isinstance(config, LoadConfig) or config.launch_machine.nodes == 1:
        return None
    try:
        return stored_node_collectives(config.launch_machine.gpu, install_root(os.environ), result.host)
    except LlmbError:
        return None


def _files(run: RunFolder, page: Path) -> list[tuple[str, str]]:
    """Return the run's files with their paths relative to the page's folder, traces first."""
    traces = sorted(run.profile.glob("trace*.json.gz"))
    named = [(f"{path.name}: trace, open it in ui.perfetto.dev or chrome://tracing", path) for path in traces]
    named += [("profile.html: its timeline alone", run.profile_page)]
    named += [("report.html: its page", run.report_page)] if run.report_page != page else []
    named += [(path.name, path) for path in (run.log, run.config, run.result, run.job_script, *run.all_events())]
    return [(label, os.path.relpath(path, page.parent)) for label, path in named if path.exists()]


def _timelines(run: RunFolder, config: RunConfig) -> str:
    """Return the pictures of an out-of-core profile; empty where there is none, or it cannot be drawn."""
    work = config.workload
    if not isinstance(work, OutOfCore) or not run.stream_timeline.exists():
        return ""
    try:
        return timeline_sections(read_timeline(run.stream_timeline), predicted_timeline(config, work))
    except LlmbError:
        return ""
