"""Warnings about the loss of a run: that it rose, or ends above uniform guessing; noise is neither."""

import math
from random import Random

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, StepDone
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.result import Result

UNIFORM = math.log(128256)


@pytest.fixture
def llama(recipes):
    return resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=1, gpu="h200"))


def result_of(config, losses) -> Result:
    steps = [StepDone(step=n, seconds=1.0, tokens=131072, loss=loss) for n, loss in enumerate(losses, start=1)]
    return derive(config, [*steps, RunEnded(status="ok")])


def loss_codes(config, losses) -> list[str]:
    return [warning.code for warning in result_of(config, losses).warnings if warning.code.startswith("LOSS")]


def line(first: float, last: float, count: int) -> list[float]:
    return [first + (last - first) * n / (count - 1) for n in range(count)]


@pytest.mark.parametrize("losses", [line(12.58, 24.15, 7), line(12.37, 12.75, 50), [12.58, 13.0], line(2.0, 3.0, 20)])
def test_a_loss_that_rises_is_named(llama, losses):
    assert loss_codes(llama, losses) == ["LOSS_ROSE"]
    assert loss_codes(None, losses) == ["LOSS_ROSE"]  # the log of another engine


def test_the_summary_shows_by_how_much_and_what_to_do(llama):
    text = summary(result_of(llama, line(12.58, 24.15, 7)))
    assert "warning LOSS_ROSE: the loss rose from 14.51 to 22.22, means of 3 steps: training diverges; lower lr" in text


@pytest.mark.parametrize(
    "losses", [[], [12.58], [12.58, 12.6], line(12.58, 12.4, 7), line(12.58, 11.0, 50), [*line(12.58, 11, 49), 11.5]]
)
def test_a_short_or_falling_loss_is_not(llama, losses):
    assert loss_codes(llama, losses) == []


def test_noise_of_a_small_batch_is_not_a_rise(llama):
    """Each token's loss has a standard deviation of 2 once its frequency is learned; proxies average hundreds."""
    random = Random(1)
    runs = [[10.9 + random.gauss(0, 2 / math.sqrt(1024)) for _ in range(40)] for _ in range(100)]
    assert not any(loss_codes(llama, losses) for losses in runs)


def test_a_loss_that_stays_above_uniform_guessing_is_named(llama):
    assert loss_codes(llama, line(14.0, UNIFORM + 0.7, 50)) == ["LOSS_ABOVE_UNIFORM"]
    assert loss_codes(llama, line(14.0, UNIFORM + 0.4, 50)) == []
    assert loss_codes(llama, line(14.0, UNIFORM + 0.9, 7)) == []  # wide models begin there
    assert loss_codes(None, line(14.0, UNIFORM + 0.7, 50)) == []  # vocabulary unknown
    text = summary(result_of(llama, [UNIFORM + 0.7] * 50))
    assert "warning LOSS_ABOVE_UNIFORM: the loss ends at 12.46, above ln(vocabulary) = 11.76 of uniform" in text
