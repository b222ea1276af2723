"""Nemotron-H training on the CPU: it learns, independently of accumulation and recomputation."""

import math
from functools import partial

import pytest

from llmb.config.spec import MambaConfig

HYBRID = {
    "architecture": "nemotron_h",
    "layers": 6,
    "pattern": "M-M*-M",
    "gated": False,
    "activation": "squared_relu",
    "rope": None,
    "mamba": MambaConfig(heads=4, head_dim=16, groups=2, state=8, chunk=12),
}


@pytest.fixture
def trained_hybrid(trained):
    return partial(trained, **HYBRID)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loss_decreases(trained_hybrid, dtype: str) -> None:
    done = trained_hybrid(dtype=dtype, steps=25)
    assert (done.ended().status, done.ended().reason) == ("ok", None)
    losses = done.losses()
    assert losses[0] == pytest.approx(math.log(128), rel=0.02)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.4


@pytest.mark.slow
def test_bf16_follows_fp32(trained_hybrid) -> None:
    """The learning rate is small enough that rounding errors do not grow."""
    fp32, bf16 = (trained_hybrid(dtype=dtype, steps=12, lr=3e-3).losses() for dtype in ("fp32", "bf16"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_is_bit_exact(trained_hybrid, dtype: str) -> None:
    plain = trained_hybrid(dtype=dtype).losses()
    assert trained_hybrid(dtype=dtype, recompute_layers=3).losses() == plain
    assert trained_hybrid(dtype=dtype, recompute_layers=6).losses() == plain


@pytest.mark.slow
def test_gradient_accumulation_is_equivalent(trained_hybrid) -> None:
    at_once, in_parts = trained_hybrid(mbs=4, ga=1), trained_hybrid(mbs=1, ga=4)
    assert in_parts.losses() == pytest.approx(at_once.losses(), rel=1e-5)


def test_invalid_pattern_is_one_line(trained, capsys) -> None:
    done = trained(**HYBRID | {"pattern": "M-M*-X"})
    assert done.code == 1
    assert done.ended().status == "failed"
    assert "the pattern must be 6 letters of M (Mamba), * (attention) and - (MLP)" in capsys.readouterr().err
