"""Lengths of a run's requests: the same where prompts are sampled and where they are predicted."""

from random import Random

import pytest

from llmb.config.native.request_lengths import check_spread, run_lengths, sample_length
from llmb.config.spec import Inference
from llmb.errors import ConfigError
from llmb.loadgen.prompt_sampler import TokenSampler

WORK = {"mode": "max_throughput", "use_case": "chat", "max_batch_size": 8, "concurrency": 8, "max_num_tokens": 512,
        "kv_fraction": 0.9, "num_requests": 40}  # fmt: skip


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_run_samples_the_lengths_that_its_prediction_follows(kind):
    work = Inference(**WORK, isl=64, osl=32, isl_spread=8, osl_spread=16, lengths=kind)
    lengths = run_lengths(work)
    assert lengths == TokenSampler(work.seed, 1000).lengths(work)
    assert len(lengths) == 40
    assert len(set(lengths)) > 20
    if kind == "uniform":
        assert all(56 <= isl <= 72 and 16 <= osl <= 48 for isl, osl in lengths)


def test_equal_lengths_and_those_of_a_file_are_not_listed():
    assert run_lengths(Inference(**WORK, isl=64, osl=32)) == ()
    assert run_lengths(Inference(**WORK, isl=64, osl=32, lengths="uniform")) == ()
    varied = Inference(**WORK, isl=64, osl=32, osl_spread=8, lengths="uniform", dataset="requests.jsonl")
    assert run_lengths(varied) == ()


def test_no_sampled_length_is_empty():
    random = Random(1)
    assert min(sample_length(random, 2, 50.0, "normal") for _ in range(100)) == 1
    assert {sample_length(random, 7, 3.0, "fixed") for _ in range(9)} == {7}


@pytest.mark.parametrize(
    ("length", "spread", "kind", "message"),
    [(32, 8, "fixed", "set lengths=normal or lengths=uniform"), (32, 32, "uniform", "must be less than osl 32")],
)
def test_spreads_without_effect_or_with_empty_requests_are_refused(length, spread, kind, message):
    with pytest.raises(ConfigError, match=message):
        check_spread("osl", length, spread, kind)
