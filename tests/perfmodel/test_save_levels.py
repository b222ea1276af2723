"""How few places to keep activations are shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.perfmodel.offload.save_levels import levels


@given(
    layers=st.integers(1, 9),
    groups=st.integers(1, 3),
    chunks=st.integers(1, 4),
    shares=st.tuples(*[st.integers(0, 30)] * 4),
)
def test_each_keeps_what_there_is_room_for(layers, groups, chunks, shares):
    every = layers * groups * chunks
    whole, light, full, attention = shares
    whole = min(whole, every)
    light = min(light, every - whole)
    full = min(full, every - whole - light)
    attention = min(attention, every - whole - light - full)
    found = levels(layers, groups * chunks, chunks, whole, light, full, attention)
    assert len(found) == every
    assert found.count("F") == whole + full
    assert found.count("A") == light + attention
    assert found.endswith("A" * light + "F" * whole)


def test_whole_ones_are_spread_evenly():
    assert levels(8, 1, 1, whole=0, light=0, full=4, attention=4) == "AFAFAFAF"


def test_the_first_chunks_of_a_sequence_compute_their_attention_again():
    found = levels(4, 4, 4, whole=0, light=0, full=0, attention=8)
    assert [found[layer * 4 : layer * 4 + 4] for layer in range(4)] == ["IIAA"] * 4


@pytest.mark.parametrize("attention", [1, 2, 3])
def test_what_cannot_be_even_is_scattered(attention):
    found = levels(4, 1, 1, whole=0, light=0, full=0, attention=attention)
    assert found == {1: "AIII", 2: "AIAI", 3: "AAAI"}[attention]
