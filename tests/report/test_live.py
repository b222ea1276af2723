"""The live line of training steps and of a benchmark's requests."""

import io
from dataclasses import replace

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import ServingSample, StepDone
from llmb.report.live_progress import LiveLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def config(recipes):
    actual = resolve(recipes["inference_deepseek-r1"], RunRequest(size="671b", dtype="fp8", gpus=1, proxy="small"))
    return replace(actual, workload=replace(actual.workload, num_requests=10, osl=100))


def drawn(config, *samples):
    """The last line on a terminal after these samples."""
    out = Terminal()
    live = LiveLine(config, out)
    for sample in samples:
        live.show(sample)
    live.close()
    return out.getvalue().rpartition("\x1b[2K")[2].strip()


def sample(elapsed_s, done, tokens, **more):
    return ServingSample(elapsed_s=elapsed_s, done=done, output_tokens=tokens, requests=10, **more)


def test_rates_cache_queue_and_time_left(config):
    line = drawn(
        config,
        sample(2.0, 0, 20),
        sample(10.0, 1, 200, waiting=4, running=5, blocks_used=3, blocks=4),
        sample(15.0, 2, 700, waiting=3, running=5, blocks_used=3, blocks=4),
    )
    assert line == ("2/10 requests | 100 tokens/s now, 46.67 so far | KV 75 % | 5 running, 3 waiting | 15 s | 6 s left")


def test_a_warm_up_is_shown_as_such_and_does_not_enter_the_rate(config):
    before = sample(9.0, 2, 9000, warmup=True)
    assert drawn(config, before).startswith("warm-up: 2/10 requests | ")
    assert drawn(config, before, sample(2.0, 1, 50)).startswith("1/10 requests | 25 tokens/s now, 25 so far | ")


def test_what_is_not_known_is_not_shown(config):
    assert drawn(config, ServingSample(elapsed_s=3.0, done=0)) == "0/10 requests | 3 s"
    files = replace(config, workload=replace(config.workload, dataset="requests.jsonl"))
    assert drawn(files, sample(4.0, 5, 999)).endswith("| 4 s | 4 s left")


def test_other_ranks_are_left_to_the_result(config):
    assert drawn(config, sample(1.0, 1, 10, rank=1)) == ""


@pytest.mark.parametrize(("gpus", "unit"), [(1, "TFLOP/s"), (2, "TFLOP/s/GPU")])
def test_training_on_several_gpus_names_what_is_of_one(recipes, gpus, unit):
    training = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=gpus, proxy="small"))
    parts = drawn(training, StepDone(step=1, seconds=0.5, tokens=1024)).split(" | ")
    assert parts[1] == "2,048 tokens/s"
    assert parts[2].endswith(f" {unit}")
