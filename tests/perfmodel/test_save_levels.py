"""How few places to keep activations are shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.perfmodel.offload.save_levels import save_levels


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


def test_full_saves_are_spread_evenly():
    assert save_levels(8, 1, 1, whole=0, light=0, full=4, attention=4) == "AFAFAFAF"


def test_first_chunks_of_a_sequence_recompute_their_attention():
    actual = save_levels(4, 4, 4, whole=0, light=0, full=0, attention=8)
    assert [actual[layer * 4 : layer * 4 + 4] for layer in range(4)] == ["IIAA"] * 4


@pytest.mark.parametrize("attention", [1, 2, 3])
def test_uneven_saves_are_scattered(attention):
    actual = save_levels(4, 1, 1, whole=0, light=0, full=0, attention=attention)
    assert actual == {1: "AIII", 2: "AIAI", 3: "AAAI"}[attention]
