"""Assignment of save levels where there is capacity for few activations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.perfmodel.offload.plan_candidate import save_levels


@given(
    layers=st.integers(1, 9),
    groups=st.integers(1, 3),
    chunks=st.integers(1, 4),
    shares=st.tuples(*[st.integers(0, 30)] * 4),
)
def test_levels_match_the_counts(layers, groups, chunks, shares):
    every = layers * groups * chunks
    whole, light, full, attention = shares
    whole = min(whole, every)
    light = min(light, every - whole)
    full = min(full, every - whole - light)
    attention = min(attention, every - whole - light - full)
    actual = save_levels(layers, groups * chunks, chunks, whole, light, full, attention)
    assert len(actual) == every
    assert actual.count("F") == whole + full
    assert actual.count("A") == light + attention
    assert actual.endswith("A" * light + "F" * whole)


@pytest.mark.parametrize(
    ("layers", "chunks", "full", "attention", "levels"),
    [
        (8, 1, 4, 4, "AFAFAFAF"),
        (4, 1, 0, 1, "AIII"),
        (4, 1, 0, 2, "AIAI"),
        (4, 1, 0, 3, "AAAI"),
        (4, 4, 0, 8, "IIAA" * 4),  # first chunks of a sequence recompute their attention
    ],
)
def test_saves_are_spread_evenly(layers, chunks, full, attention, levels):
    assert save_levels(layers, chunks, chunks, whole=0, light=0, full=full, attention=attention) == levels
