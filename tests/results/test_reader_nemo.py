"""NeMo logs: zero-based iterations become steps from 1; progress bars of older releases."""

from pathlib import Path

import pytest

from llmb.events import LogProblem, RunEnded, StepDone
from llmb.results.readers.nemo_log import read
from llmb.results.readers.reader_choice import read_log

LOGS = Path(__file__).parent.parent / "golden" / "logs"
LINE = (
    "Training epoch 0, iteration 49/49 | lr: 7.496e-06 | global_batch_size: 128 | global_step: 49 | "
    "peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | reduced_train_loss: 11.96 | "
    "train_step_timing in s: 12.39 | consumed_samples: 6400"
)


def steps_of(events):
    return [event for event in events if isinstance(event, StepDone)]


def test_the_published_line_gives_every_field():
    step, end = read([LINE])
    assert step == StepDone(step=50, steps=50, seconds=12.39, loss=11.96, memory_bytes=70833405952)
    assert end == RunEnded(status="ok")


@pytest.mark.parametrize("number", ["560.25", "5.6025e+02"])
def test_tflops_may_be_plain_or_scientific(number):
    (step, _) = read([f"{LINE} | TFLOPS_per_GPU: {number}"])
    assert step.reported_tflops_per_gpu == 560.25


def test_a_whole_log_of_fifty_steps():
    events = list(read_log(LOGS / "nemo.out"))
    steps = steps_of(events)
    assert [step.step for step in steps] == list(range(1, 51))
    assert all(step.steps == 50 and step.seconds and step.reported_tflops_per_gpu for step in steps)
    assert events[-1] == RunEnded(status="ok")


def test_progress_bars_are_split_at_carriage_returns():
    events = list(read_log(LOGS / "nemo_progress_bar.out"))
    steps = steps_of(events)
    assert [step.step for step in steps] == list(range(1, 21))
    assert steps[9].seconds == 24.09
    assert steps[0].loss == 0.5
    assert LogProblem(problem="step seen again") in events
    assert events[-1] == RunEnded(status="ok")


def test_a_step_line_without_a_readable_time_is_counted_not_guessed():
    events = list(read([LINE.replace("12.39", "unknown"), LINE]))
    assert LogProblem(problem="unreadable step line") in events
    assert len(steps_of(events)) == 1
