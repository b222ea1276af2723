"""Learning-rate schedule."""

import math

import pytest

from llmb.config.spec import Training
from llmb.runtime.adamw_settings import learning_rate


def training_config(**fields) -> Training:
    return Training(seqlen=8, mbs=1, gbs=1, ga=1, lr=1.0, **fields)


def rates(training: Training, *steps: int) -> list[float]:
    return [learning_rate(step, training) for step in steps]


def test_linear_warmup_then_constant() -> None:
    assert rates(training_config(), 1, 5, 10, 11, 50) == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert rates(training_config(lr_warmup_steps=4), 1, 2, 4, 5) == [0.25, 0.5, 1.0, 1.0]
    assert rates(training_config(lr_warmup_steps=0), 1, 2) == [1.0, 1.0]


def test_cosine_decay_to_a_tenth() -> None:
    training = training_config(lr_warmup_steps=10, lr_decay_steps=110)
    assert rates(training, 5, 10, 60, 110, 111, 500) == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1, 0.1])
    assert learning_rate(35, training) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    all_rates = rates(training, *range(10, 120))
    assert all_rates == sorted(all_rates, reverse=True)
