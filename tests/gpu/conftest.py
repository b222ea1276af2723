"""Tests on a GPU time each candidate of a GEMM once, unless they need the GPU to themselves."""

import gc

import pytest
import torch

from llmb.ops.gemm import algorithm_trial


@pytest.fixture(autouse=True)
def free_memory_of_earlier_tests() -> None:
    """Modules refer to themselves through their forward passes: only the collector frees a model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def short_algorithm_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to other workers a longer trial measures nothing better."""
    if request.node.get_closest_marker("exclusive") is None:
        for name in ("INTERLEAVED_S", "FIRST_INTERLEAVED_S", "REPEATED_S"):
            monkeypatch.setattr(algorithm_trial, name, 0.0)
