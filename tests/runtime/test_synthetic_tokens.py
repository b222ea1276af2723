"""Synthetic tokens: only their frequency can be learned, 0.88 below the loss of uniform guessing."""

import math

import pytest
import torch

from llmb.runtime.synthetic_tokens import synthetic_tokens

VOCAB = 128256


def test_the_lowest_loss_is_the_entropy_of_the_frequencies():
    """A token v = floor(u^3 V) has the probability ((v + 1)^(1/3) - v^(1/3)) / V^(1/3)."""
    edges = torch.arange(VOCAB + 1, dtype=torch.float64).pow(1 / 3) / VOCAB ** (1 / 3)
    log_probabilities_V = edges.diff().log()
    tokens = synthetic_tokens(1234, 0, (64, 8192), VOCAB, torch.device("cpu"))
    loss = -log_probabilities_V[tokens].mean().item()
    entropy = -(log_probabilities_V.exp() * log_probabilities_V).sum().item()
    assert loss == pytest.approx(entropy, abs=0.01)
    assert entropy == pytest.approx(math.log(VOCAB) - 0.88, abs=0.01)


def test_neighbours_say_nothing_about_a_token():
    ids = synthetic_tokens(1, 0, (16, 8192), VOCAB, torch.device("cpu")).double().pow(1 / 3)
    pairs = torch.stack((ids[:, :-1].flatten(), ids[:, 1:].flatten()))
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.01
