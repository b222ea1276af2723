"""Ladders: lists, doubling ranges, steps, refusals."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.errors import ConfigError
from llmb.loadgen.sweep.ladder import Precision, parse_ladder, parse_precision


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4..1024", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
        ("1..50", (1, 2, 4, 8, 16, 32, 50)),
        ("7", (7,)),
        ("8, 2,2", (2, 8)),
        ("10..50+10", (10, 20, 30, 40, 50)),
        ("10..45+10", (10, 20, 30, 40, 45)),
        ("3..3", (3,)),
        ("0.5..2", (0.5, 1, 2)),
        ("0.1..0.4+0.1", (0.1, 0.2, pytest.approx(0.3), 0.4)),
        ("1e3", (1000,)),
    ],
)
def test_values_of_a_ladder(text, values):
    assert parse_ladder(text) == values


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1...4", "4..1", "1..", "1,,2", "1..4+0", "inf", "1e999", "1+2"])
def test_what_is_no_ladder_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match="--concurrency"):
        parse_ladder(text, whole=True, option="--concurrency")


def test_whole_numbers_and_too_many_values():
    assert parse_ladder("1..8", whole=True) == (1, 2, 4, 8)
    assert all(isinstance(value, int) for value in parse_ladder("1..8", whole=True))
    with pytest.raises(ConfigError, match=r"1\.5 is not a whole number"):
        parse_ladder("1.5,2", whole=True)
    with pytest.raises(ConfigError, match="more than 1000 values"):
        parse_ladder("1..1e9+1")


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_a_range_doubles_from_its_start_and_includes_its_end(first, more):
    values = parse_ladder(f"{first}..{first + more}", whole=True)
    assert values[0] == first
    assert values[-1] == first + more
    assert all(b == 2 * a for a, b in pairwise(values[:-1]))
    assert list(values) == sorted(set(values))


def test_precision():
    assert parse_precision("5%") == Precision(relative=0.05)
    assert parse_precision("2") == Precision(absolute=2)
    assert Precision(relative=0.05).reached(100, 105)
    assert not Precision(relative=0.05).reached(100, 106)
    with pytest.raises(ConfigError, match="--precision"):
        parse_precision("fine")
