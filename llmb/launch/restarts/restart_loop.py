"""Restarts a failed run from its newest checkpoint, up to `max_restarts` times.

    run, outcome = run_with_restarts(config, run, lambda config, run: run_local(...))

Each start works in a folder of its own, restart-<n>/, with the configuration of that start: where it resumes, the
time that is left, and which faults of the plan have been injected. A failure is detected as in any run (supervisor,
verdict, hang detector); nothing here knows whether it was injected, except to count. Interrupted runs, those that ran
out of time or diverged, and refused configurations do not restart.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmb import events
from llmb.config.serialization import to_json, write_atomic
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.events import FaultInjected, RunLaunched, StepDone, read_all
from llmb.formats.checkpoint_steps import checkpoint_step, complete_checkpoints
from llmb.launch.local import RunOutcome
from llmb.launch.run_folder import RunFolder, write_error
from llmb.launch.secrets import mask

Start = Callable[[RunConfig, RunFolder], RunOutcome]


def run_with_restarts(config: RunConfig, run: RunFolder, start: Start) -> tuple[RunFolder, RunOutcome]:
    """Run until it ends for good; return the folder of its last start and the outcome of that."""
    if config.limits.max_restarts == 0:
        return run, start(config, run)
    began = time.monotonic()
    this = resumed_config(config, run, 0.0) if run.restart else config
    while True:
        _record_launch(this, run)
        outcome = start(this, run)
        spent_s = time.monotonic() - began
        if not _restarts(config, run, outcome, spent_s):
            return run, replace(outcome, seconds=spent_s)
        run = run.create_restart()
        this = resumed_config(config, run, spent_s)


def resumed_config(config: RunConfig, run: RunFolder, spent_s: float) -> RunConfig:
    """Return the configuration of a restart, and write it into its folder."""
    work, plan = config.workload, config.fault_injection
    assert isinstance(work, Training)
    newest = newest_checkpoint(run)
    this = replace(
        config,
        workload=replace(work, resume=work.resume if newest is None else str(newest)),
        limits=replace(config.limits, time_limit_s=max(1, int(config.limits.time_limit_s - spent_s))),
        fault_injection=None if plan is None else replace(plan, injected=tuple(sorted(injected_faults(run)))),
    )
    text = to_json(replace(this, environment=mask(this.environment)), indent=2)
    write_atomic(run.start_config, text + "\n")
    return this


def newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the newest complete checkpoint of all starts; None: there is none yet."""
    complete = [path for start in run.starts for path in complete_checkpoints(start.checkpoints)]
    return max(complete, key=checkpoint_step, default=None)


def injected_faults(run: RunFolder) -> set[int]:
    """Return the indices of the faults that any start of the run has injected."""
    recorded = (event for start in run.starts for event in read_all(start.all_events()))
    return {event.fault for event in recorded if isinstance(event, FaultInjected)}


def _restarts(config: RunConfig, run: RunFolder, outcome: RunOutcome, spent_s: float) -> bool:
    """Return whether a run that ended so starts again."""
    newest, work = newest_checkpoint(run), config.workload
    assert isinstance(work, Training)
    return (
        outcome.status in ("failed", "oom")
        and outcome.interrupted is None
        and not _is_refused(run, outcome)
        and run.restart < config.limits.max_restarts
        and spent_s < config.limits.time_limit_s
        and (newest is None or checkpoint_step(newest) < work.steps)
    )


def _is_refused(run: RunFolder, outcome: RunOutcome) -> bool:
    """Return whether the engine refused the configuration, which it would do again; torchrun exits with 1 anyway."""
    recorded = read_all(run.all_events())
    return outcome.exit_code == ConfigError.exit_code and not any(
        isinstance(event, StepDone | FaultInjected) for event in recorded
    )


def _record_launch(config: RunConfig, run: RunFolder) -> None:
    resume = getattr(config.workload, "resume", None)
    newest = newest_checkpoint(run) if run.restart else None
    step = checkpoint_step(newest) if newest is not None else 0
    launched = RunLaunched(time=time.time(), start=run.restart, step=step, checkpoint=resume)
    try:
        events.append(run.events(0), launched)
    except OSError as error:
        raise write_error(run.events(0), error) from error
