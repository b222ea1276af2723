"""bench/rank_curves.py: the distance of a layout to one rank against that of two seeds, and what a run is given."""

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from llmb.config.parallel_layout import check_model, check_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
rank_curves = import_module("rank_curves")
ONE_RANK = [8 - step / 50 for step in range(100)]
OTHER_SEED = [loss + 0.02 for loss in ONE_RANK]


def test_smoothing_takes_the_mean_of_the_last_ten_steps():
    assert rank_curves.smoothed([float(n) for n in range(1, 21)])[-1] == 15.5
    assert rank_curves.smoothed([3.0, 1.0]) == [3.0, 2.0]


def test_a_layout_is_judged_by_its_largest_distance_in_the_last_half():
    early = [loss + (1.0 if step < 40 else 0.001) for step, loss in enumerate(ONE_RANK)]
    near = rank_curves.compare(early, ONE_RANK, OTHER_SEED)
    assert near.largest == pytest.approx(0.001)
    assert near.seeds_mean == pytest.approx(0.02)
    assert (near.closer, near.is_within) == (50, True)
    late = [*ONE_RANK[:80], *(loss + 0.03 for loss in ONE_RANK[80:90]), *ONE_RANK[90:]]
    far = rank_curves.compare(late, ONE_RANK, OTHER_SEED)
    assert far.largest == pytest.approx(0.03)
    assert far.mean < far.seeds_mean
    assert not far.is_within


def test_every_layout_has_the_batch_of_one_rank_and_divides_the_model():
    options = Namespace(layers=4, hidden=128, seqlen=128, batch=8, steps=100, lr=1e-3)
    base = rank_curves.configuration(options, None)
    for layout in (rank_curves.Parallel(), *rank_curves.LAYOUTS):
        config = rank_curves.Curve("bf16", layout, 1).config(base)
        work = config.workload
        assert work.mbs * work.ga * layout.dp == work.gbs == 8
        assert check_ranks(layout, config.machine.gpus) == layout
        check_model(layout, config.model)
