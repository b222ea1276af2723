"""Our own engine on one H200: predictions beside the figures of bench/RESULTS.md."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from llmb.perfmodel.offload.machine_rates import H200

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
native = import_module("native_accuracy")


@pytest.fixture(scope="module")
def in_core():
    return native.samples(plans=False)


def test_every_row_that_fits_the_gpu_is_within_five_percent(in_core):
    """Rows of kernels that have been replaced since have their rates as timed alone then, which are less certain."""
    assert len(in_core) >= 102
    assert len([row for row in in_core if row.kernels]) == 2
    assert all(abs(row.error) < 6 for row in in_core if row.kernels)
    assert not [f"{row.row}: {row.error:+.1f} %" for row in in_core if abs(row.error) > native.AIM and not row.kernels]


def test_predictions_are_not_all_on_one_side(in_core):
    assert any(row.error > 1 for row in in_core)
    assert any(row.error < -1 for row in in_core)


@pytest.mark.nightly
def test_out_of_core_rows_are_within_five_percent():
    rows = [row for row in native.samples() if row.kind == "out of core"]
    assert len(rows) == 14
    assert not [f"{row.row}: {row.error:+.1f} %" for row in rows if abs(row.error) > native.AIM]


def test_probed_rates_scale_the_prediction(in_core):
    names = ("matmul_tflops", "fp8_tflops", "memory_gbs")
    chip = replace(H200, **{name: 0.9 * getattr(H200, name) for name in names})
    slower = native.samples(chip, plans=False)
    for usual, slow in zip(in_core, slower, strict=True):
        # Copies of activations to the host bound a part of it, or gaps between kernels: of a Mamba layer, or when few
        # tokens are served. One rank alone may wait for its host.
        is_partial = "Nemotron" in slow.row or "offload" in slow.row
        least = 1.04 if slow.kind in ("serving", "one rank") else 1.05 if is_partial else 1.08
        assert least < slow.predicted_s / usual.predicted_s < 1.112
