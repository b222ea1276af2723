"""Parts of bench/ab_gpu.py that need no GPU: the choice of micro-batches, and shapes that divide."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
ab_gpu = import_module("ab_gpu")


def test_the_pair_nearest_to_one_percent_is_chosen_the_slower_first():
    assert ab_gpu.nearest_pair({1: 1.2, 2: 1.012, 4: 1.0, 8: 1.05}) == (2, 4)
    assert ab_gpu.nearest_pair({1: 1.0, 2: 1.008, 4: 1.2}) == (2, 1)


@pytest.mark.parametrize("shape", [ab_gpu.IDENTICAL, ab_gpu.MICRO_BATCHES, ab_gpu.TINY])
def test_micro_batches_divide_the_global_batch(shape):
    config = ab_gpu.run_config(shape, shape.gbs // 2, torch.device("cuda", 0))
    assert config.workload.mbs * config.workload.ga == config.workload.gbs == shape.gbs
    assert config.model.heads % config.model.kv_heads == 0


def test_trials_end_with_the_time(monkeypatch):
    runs = ab_gpu.ShortRuns(ab_gpu.TINY, torch.device("cpu"))
    monkeypatch.setattr(runs, "step_s", lambda mbs: 1.0)
    assert len(ab_gpu.identical(runs, trials=3, limit_s=60.0)) == 3
    assert ab_gpu.identical(runs, trials=3, limit_s=0.0) == []
