"""NeMo logs: `Training epoch 0, iteration 49/49 | ... | train_step_timing in s: 12.39 | ...`, and the progress bars of
25.03 and older: `Epoch 0: : 100%|...| 50/50 [..., global_step=49.00, train_step_timing in s=24.00]`.

Both count from 0, up to one less than the steps asked for; our steps count from 1.
"""

import re
from collections.abc import Iterable, Iterator

from llmb.events import Event, StepDone
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_fields import field, measure, number
from llmb.results.readers.log_lines import Line

SIGNATURE = rb"train_step_timing in s"

_WORDS = (b"train_step_timing",)
_ITERATION = re.compile(r"iteration\s+(\d{1,9})\s*/\s*(\d{1,9})")
_BAR = re.compile(r"\b\d{1,9}/(\d{1,9}) \[.{0,400}?\bglobal_step=(\d{1,9})\b")
_SECONDS = field(r"train_step_timing in s")
_LOSS = field(r"reduced_train_loss")
_GRAD_NORM = field(r"grad[ _]norm")
_TFLOPS = field(r"TFLOPS_per_GPU")
_MEMORY = field(r"peak_memory_usage")


def read(lines: Iterable[bytes | str]) -> Iterator[Event]:
    """Yield the steps of a NeMo log, then the outcome."""
    outcome = LogOutcome()
    for line in outcome.scanned(lines, _WORDS):
        step = _step(line)
        if step is None:
            outcome.unreadable += "train_step_timing" in line.text
        elif outcome.accept(step):
            yield step
    yield from outcome.events()


def _step(line: Line) -> StepDone | None:
    seconds = measure(_SECONDS, line.text)
    if seconds is None:
        return None
    if match := _ITERATION.search(line.text):
        step, steps = int(match[1]) + 1, int(match[2]) + 1
    elif match := _BAR.search(line.text):
        step, steps = int(match[2]) + 1, int(match[1])
    else:
        return None
    memory = measure(_MEMORY, line.text)
    return StepDone(
        rank=line.rank,
        step=step,
        steps=steps,
        seconds=seconds,
        loss=number(_LOSS, line.text),
        grad_norm=number(_GRAD_NORM, line.text),
        memory_bytes=None if memory is None else round(memory),
        reported_tflops_per_gpu=measure(_TFLOPS, line.text),
    )
