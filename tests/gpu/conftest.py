"""Tests on a GPU time each candidate of a GEMM once, unless they need the GPU to themselves."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from cuda_checks import GPU

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


@pytest.fixture
def nccl() -> Iterator[None]:
    """NCCL with this process as its only rank."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=GPU)
    yield
    dist.destroy_process_group()
