"""Tests on a GPU time each candidate of a GEMM once, unless they need the GPU to themselves."""

import pytest

from llmb.ops.gemm import algorithm_trial


@pytest.fixture(autouse=True)
def short_algorithm_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to other workers a longer trial measures nothing better."""
    if request.node.get_closest_marker("exclusive") is None:
        for name in ("INTERLEAVED_S", "FIRST_INTERLEAVED_S", "REPEATED_S"):
            monkeypatch.setattr(algorithm_trial, name, 0.0)
