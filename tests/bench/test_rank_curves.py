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
LAYOUT = rank_curves.LAYOUTS[0]


def compare(layout, other_layout=None):
    """Compare curves of a layout from two seeds, whose single ranks are 0.02 apart."""
    one_rank = rank_curves.Parallel()
    other_seed = [loss + 0.02 for loss in ONE_RANK]
    losses = {
        rank_curves.Curve("bf16", one_rank, 1): ONE_RANK,
        rank_curves.Curve("bf16", one_rank, 2): other_seed,
        rank_curves.Curve("bf16", LAYOUT, 1): layout,
        rank_curves.Curve("bf16", LAYOUT, 2): other_seed if other_layout is None else other_layout,
    }
    return rank_curves.compare(losses, "bf16", LAYOUT, range(1, 3))


def test_smoothing_takes_the_mean_of_the_last_ten_steps():
    assert rank_curves.smoothed([float(n) for n in range(1, 21)])[-1] == 15.5
    assert rank_curves.smoothed([3.0, 1.0]) == [3.0, 2.0]


def test_a_layout_is_judged_by_its_distances_in_the_last_half():
    near = compare([loss + (1.0 if step < 40 else 0.002) for step, loss in enumerate(ONE_RANK)])
    assert (near.largest, near.mean) == pytest.approx((0.001, 0.001))  # of two seeds, one without any distance
    assert (near.seeds_largest, near.seeds_mean) == pytest.approx((0.02, 0.02))
    assert near.is_within
    far = compare([*ONE_RANK[:80], *(loss + 0.06 for loss in ONE_RANK[80:90]), *ONE_RANK[90:]])
    assert far.largest == pytest.approx(0.03)
    assert far.mean < far.seeds_mean
    assert not far.is_within


def test_bias_has_a_sign_and_an_error():
    opposite = compare([loss + 0.01 for loss in ONE_RANK], [loss + 0.01 for loss in ONE_RANK])
    assert opposite.bias == pytest.approx(0.0)
    assert opposite.bias_error == pytest.approx(0.01)
    assert opposite.mean == pytest.approx(0.01)


def test_every_layout_has_the_batch_of_one_rank_and_divides_the_model():
    options = Namespace(layers=4, hidden=128, seqlen=128, batch=8, steps=100, lr=1e-3)
    base = rank_curves.configuration(options, None)
    for layout in (rank_curves.Parallel(), *rank_curves.LAYOUTS):
        config = rank_curves.Curve("bf16", layout, 1).config(base)
        work = config.workload
        assert work.mbs * work.ga * layout.dp == work.gbs == 8
        assert check_ranks(layout, config.machine.gpus) == layout
        check_model(layout, config.model)
