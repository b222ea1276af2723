"""Step times of one training run, from the log of any engine or from our own events.

    run = read_timed_log(Path("log-pretrain.out"))       NeMo, Megatron-Bridge or torchtitan, by its content
    run = timed_run(log, config, events, "L3")           a run of llmb

Iterations keep the numbers of the log: from 0 in NeMo's, from 1 in all others. A serving run has no steps: None.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.events import Event, RunEnded, StepDone
from llmb.perfmodel import flops, metrics
from llmb.results.derive import derive
from llmb.results.log_window import FIRST_ITERATION
from llmb.results.readers.log_lines import file_lines
from llmb.results.readers.reader_choice import READERS, detect

# Logs of other steps of a job, and prefixes of logs that are no experiment unless they contain timings.
_OTHER_LOGS = ("nccltrace", "prepare_squad_dataset_exp", "import_ckpt_exp", "nsys_analysis")
_OTHER_STARTS = ("sbatch_", "slurm-", "vboost")
_EXPERIMENT_WORDS = (b"iteration", b"training", b"model", b"experiment")
_WITHOUT_ERROR = ("ok", "incomplete")
_ACCOUNT = re.compile(r"^.*?\.(?=[A-Za-z])(?!out$)")  # log-<account>-<experiment>. in front of the name itself


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One iteration."""

    seconds: float | None
    tflops_per_gpu: float | None
    not_a_number: str | None  # `loss=nan`, if it is


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """Iterations of a run, and how it ended."""

    name: str  # ends in the job id, where one is known
    log: Path
    job_id: str | None = None
    steps: dict[int, TimedStep]
    first: int = 1  # number of the first iteration
    last: int | None = None  # number of the last one requested; null: unknown
    window: tuple[int, int] | None = None  # of its configuration; of its recipe if the run is too short for that
    failure: str | None = None  # why it is not complete
    failed: bool = False  # it ended with an error, perhaps after its last step; a log that just stops may go on


def find_logs(folder: Path, pattern: str) -> list[Path]:
    """Return the logs below a folder, without those of other steps of a job."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    logs = [path for path in sorted(folder.rglob(pattern)) if path.is_file()]
    if not logs:
        raise ConfigError(f"no {pattern} files below {folder}")
    return [path for path in logs if not any(word in path.name for word in _OTHER_LOGS)]


def short_name(file_name: str) -> str:
    """Return the experiment of a log file: its name without account prefix and task number."""
    return _ACCOUNT.sub("", file_name).removesuffix(".out").removesuffix("_0")


def read_timed_log(log: Path) -> TimedRun | None:
    """Read a log of another engine; None if it is not one of a training run."""
    reader = detect(log)
    if reader not in FIRST_ITERATION:
        failure = "no timing lines"
        experiment = reader is None and _is_experiment(log)
        return TimedRun(name=short_name(log.name), log=log, steps={}, failure=failure) if experiment else None
    events = list(READERS[reader].events(log))
    first = FIRST_ITERATION[reader]
    steps: dict[int, TimedStep] = {}  # where ranks print alike, the first counts
    for event in _steps(events):
        steps.setdefault(event.step - 1 + first, _timed_step(event, event.reported_tflops_per_gpu))
    requested = next((event.steps for event in _steps(events) if event.steps), None)
    end = next((event for event in reversed(events) if isinstance(event, RunEnded)), None)
    return TimedRun(
        name=short_name(log.name),
        log=log,
        steps=steps,
        first=first,
        last=None if requested is None else requested - 1 + first,
        failure=" ".join(end.reason.split()) if end is not None and end.reason and end.status != "ok" else None,
        failed=end is not None and end.status not in _WITHOUT_ERROR,
    )


def timed_run(log: Path, config: RunConfig, events: list[Event], job_id: str | None) -> TimedRun | None:
    """Return the iterations of a run of llmb; TFLOP/s are those its engine reports, or else model FLOPs over time."""
    work = config.workload
    if isinstance(work, Inference):
        return None
    sequence_flops = flops.run_flops_per_sequence(config)
    steps: dict[int, TimedStep] = {}
    for event in sorted(_steps(events), key=lambda step: step.rank):
        step_flops = sequence_flops * event.tokens / work.seqlen if event.tokens else None
        tflops = event.reported_tflops_per_gpu
        if tflops is None and config.one_rank is None:
            tflops = metrics.tflops_per_gpu(step_flops, event.seconds, config.machine.gpus)
        steps.setdefault(event.step, _timed_step(event, tflops))
    windows = (
        o.replaced for o in config.overrides if o.field == "window" and o.replaced and o.replaced[1] > work.steps
    )
    first, last = next(windows, work.window)
    result = derive(config, events)
    return TimedRun(
        name=f"{config.name}_{job_id}" if job_id else config.name,
        log=log,
        job_id=job_id,
        steps=steps,
        last=work.steps,
        window=(first, last),
        failure=None if result.status == "ok" else f"{result.status}: {result.reason or 'no reason is recorded'}",
        failed=result.status not in _WITHOUT_ERROR,
    )


def _steps(events: Iterable[Event]) -> Iterator[StepDone]:
    return (event for event in events if isinstance(event, StepDone))


def _timed_step(step: StepDone, tflops_per_gpu: float | None) -> TimedStep:
    return TimedStep(seconds=step.seconds, tflops_per_gpu=tflops_per_gpu, not_a_number=_not_a_number(step))


def _not_a_number(step: StepDone) -> str | None:
    for field in ("grad_norm", "loss"):
        value = getattr(step, field)
        if value is not None and not math.isfinite(value):
            return f"{field}={value}"
    return None


def _is_experiment(log: Path) -> bool:
    if log.name.startswith(_OTHER_STARTS):
        return False
    return any(True for _ in file_lines(log).having(_EXPERIMENT_WORDS, lambda: False))
