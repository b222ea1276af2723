"""`bench/accuracy.py` on the published rows of tests/golden: fit, errors, interval, scaling curves, picture."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from llmb.perfmodel.step_time.published_rows import parse_row, read_rows
from llmb.perfmodel.step_time.step_constants import calibrated, constants

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
accuracy = import_module("accuracy")
step_intervals = import_module("prediction.step_intervals")
unfitted_rows = import_module("prediction.unfitted_rows")
layout_ranking = import_module("prediction.layout_ranking")
PUBLISHED = Path(__file__).parent.parent / "golden" / "published_training_rows.csv"
LLAMA = {"source": "v25.04", "model": "llama3.1", "size": "8b", "gpu": "h100", "dtype": "bf16", "seqlen": "8192",
         "mbs": "1", "tp": "1", "cp": "2"}  # fmt: skip


@pytest.fixture(scope="module")
def samples():
    return accuracy.usable(read_rows(PUBLISHED))[0]


def test_the_fit_lowers_the_error_and_is_deterministic(samples):
    priors = {name: constant.prior for name, constant in constants().items()}
    fitted = accuracy.fitted(samples, rounds=2)
    before, after = (np.median(np.abs(accuracy.errors_with(samples, c))) for c in (priors, fitted))
    assert after < before
    assert accuracy.fitted(samples, rounds=2) == fitted


def test_a_constant_without_rows_stays_at_its_prior(samples):
    hopper = [sample for sample in samples if sample.setup.gpu == "h100"]
    fitted = accuracy.fitted(hopper, rounds=2)
    assert fitted["gemm_bf16_ampere"] == pytest.approx(constants()["gemm_bf16_ampere"].prior)


def test_widths_and_coverage_of_known_errors(samples):
    errors = np.linspace(0.0, 0.1, len(samples))
    assert 0 < accuracy.half_widths(samples, errors)["dense"] <= 0.1
    inside = step_intervals.rows_inside(samples, lambda s: s.model, errors)
    assert 0 < inside.mean() <= 1
    rows = step_intervals.coverage_rows(samples, inside, inside)
    (h100,) = [row for row in rows if row[0] == "GPU h100"]
    members = [held for held, s in zip(inside, samples, strict=True) if s.setup.gpu == "h100"]
    assert h100[1:] == (len(members), *[f"{100 * np.mean(members):.0f}"] * 2)
    assert all(count >= step_intervals.FEW_ROWS for _, count, *_ in rows)


def test_rows_that_cannot_be_used_are_listed_by_reason():
    row = parse_row(LLAMA | {"gpus": "8", "gbs": "128"})
    impossible = parse_row(LLAMA | {"gpus": "8", "gbs": "128", "step_time_s": "1"})
    _, left_out = accuracy.usable([row, impossible, parse_row(LLAMA | {"model": ""})])
    assert {reason: len(rows) for reason, rows in left_out.items()} == {
        "no measured time": 1, "above the peak of the GPU": 1, "no model": 1,
    }  # fmt: skip


def test_releases_of_one_curve_are_compared_by_their_shape():
    """The second is 10 % slower throughout, and 6 % more on the largest scale: 4 % above its mean change."""
    times = {"v25.02": ("12", "12", "12"), "v25.04": ("13.2", "13.2", "13.992")}
    rows = [
        parse_row(
            LLAMA | {"source": f"NVIDIA/x README.md {release}@1", "gpus": str(n), "gbs": str(16 * n), "step_time_s": t}
        )
        for release, seconds in times.items()
        for n, t in zip((8, 16, 32), seconds, strict=True)
    ]
    samples = [replace(sample, setup=replace(sample.setup, engine="megatron")) for sample in accuracy.usable(rows)[0]]
    (difference,) = accuracy.release_differences(samples)
    assert difference == ("llama3 8b h100 bf16", "8-32", "v25.02 and v25.04", "3.9")


def test_a_curve_shifted_as_a_whole_has_the_right_shape():
    rows = [parse_row(LLAMA | {"gpus": str(n), "gbs": str(16 * n), "step_time_s": "20"}) for n in (8, 16, 32)]
    (curve,) = accuracy.scaling_curves(accuracy.usable(rows)[0], calibrated())
    assert curve[1:3] == ("8-32", "3")
    assert float(curve[3]) < 2


def test_the_picture_has_a_point_for_each_row(samples):
    picture = accuracy.picture(samples, accuracy.errors_with(samples, calibrated()))
    assert picture.count("<circle") == len(samples)


def test_pairs_of_layouts_are_compared_by_their_ratio():
    """Two scales of tp 1 and tp 2: a tenth faster in both; an error that both layouts share does not count."""
    rows = [
        parse_row(
            LLAMA | {"cp": "1", "tp": tp, "gpus": str(n), "gbs": str(16 * n), "step_time_s": seconds, "notes": notes}
        )
        for n in (8, 64)
        for tp, seconds, notes in (("1", "11", ""), ("2", "10", ""))
    ]
    samples = accuracy.usable(rows)[0]
    (pair,) = layout_ranking.layout_pairs(samples)
    assert pair.changed == {"tp"}
    assert len(pair.rows) == 2  # 8 with 8 GPUs, 64 with 64
    assert np.exp(pair.measured) == pytest.approx(1.1)
    shared, opposite = np.full(4, 0.3), np.array([-0.15, 0.0, -0.15, 0.0])  # tp 1 is predicted faster by as much
    assert pair.error(shared) == pytest.approx(0)
    assert pair.is_ordered(shared)
    assert not pair.is_ordered(opposite)
    header, row = layout_ranking.RANKING_HEADER, layout_ranking.ranking_rows([pair], shared, opposite)[0]
    assert row == ("all", 1, "0.0", "0.0", "1 of 1", "13.9", "13.9", "0 of 1")
    assert len(header) == len(row)


def test_contradictory_settings_and_other_trainings_make_no_pair():
    first = LLAMA | {"gpus": "8", "gbs": "128", "step_time_s": "20"}
    conflict = first | {"vp": "6", "notes": "config conflict vp: 12 in an earlier release"}
    others = ({"gpus": "32"}, {"seqlen": "4096"}, {"dtype": "fp8"})
    changed = [first | {"cp": "1"} | other for other in others]
    samples = accuracy.usable([parse_row(cells) for cells in (first, conflict, *changed)])[0]
    assert len(samples) == 5
    assert layout_ranking.layout_pairs(samples) == []
    assert len(layout_ranking.release_noise(samples)) == 0


def test_the_stated_speed_is_the_same_on_a_slower_machine():
    assert {accuracy.at_least(rate) for rate in (1000, 2310, 5060)} == {"at least 1,000"}


def test_rows_that_were_never_fitted_are_described_and_compared():
    rows = unfitted_rows.unfitted_rows()
    megatron = [row for row in rows if row.setup.engine.startswith("megatron")]
    assert len(rows) >= 50
    assert np.median(np.abs(np.expm1(unfitted_rows.errors_of(megatron)))) < 0.06
    text = unfitted_rows.unfitted_section([rows[0].setup], accuracy.summary, accuracy.table)
    assert f"1 of the {len(rows)} have the description of a fitted row" in text
    assert text.count("| no |") == sum(not row.is_inside for row in rows)
