"""Search for the highest load that holds: exact on any monotone function, few measurements, none twice, resumable."""

from math import log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmb.errors import ConfigError
from llmb.loadgen.sweep.ladder import Precision
from llmb.loadgen.sweep.load_search import SearchRange, bracket, next_load, next_of_many


def measure_all(holds, search, judged=None):
    """Run a search to its end; return the judged loads in the order of measurement."""
    judged = dict(judged or {})
    while (load := next_load(judged, search)) is not None:
        assert load not in judged, f"{load} is measured twice"
        judged[load] = holds(load)
    return judged


@given(st.integers(0, 5000), st.integers(1, 200), st.integers(0, 4000))
@example(0, 1, 1023)
@example(1024, 1, 1023)
@example(5000, 1, 0)
def test_a_search_finds_the_optimum_of_any_monotone_function(optimum, lowest, width):
    search = SearchRange(lowest=lowest, highest=lowest + width)
    judged = measure_all(lambda load: load <= optimum, search)
    expected = None if optimum < lowest else min(optimum, search.highest)
    assert bracket(judged).passing == expected
    if lowest == 1:
        assert len(judged) <= (2 * log2(max(1, expected or 1)) + 2)


@given(st.integers(0, 3000), st.integers(1, 2999), st.sets(st.integers(1, 2999), max_size=20))
def test_points_that_were_measured_for_another_reason_count(optimum, highest, measured):
    search = SearchRange(lowest=1, highest=highest)
    measured_loads = {load: load <= optimum for load in measured}
    judged = measure_all(lambda load: load <= optimum, search, measured_loads)
    inside = {load: holds for load, holds in judged.items() if load <= highest}
    assert bracket(inside).passing == (min(optimum, highest) or None)


@given(st.integers(0, 1000), st.integers(0, 20))
def test_a_killed_search_continues_with_the_same_loads(optimum, kill_after):
    search = SearchRange(lowest=1, highest=700)
    whole = measure_all(lambda load: load <= optimum, search)
    killed = dict(list(whole.items())[:kill_after])
    assert list(measure_all(lambda load: load <= optimum, search, killed)) == list(whole)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=5))
def test_tiers_share_measurements(optima):
    search = SearchRange(lowest=1, highest=512)
    measured = []
    while True:
        judgements = [{load: load <= optimum for load in measured} for optimum in optima]
        load = next_of_many(judgements, search)
        if load is None:
            break
        assert load not in measured
        measured.append(load)
    for optimum in optima:
        assert bracket({load: load <= optimum for load in measured}).passing == (min(optimum, 512) or None)


@given(st.floats(0.0, 60.0), st.sampled_from([0.01, 0.02, 0.05, 0.2]))
def test_rates_are_found_to_the_stated_precision(optimum, relative):
    search = SearchRange(lowest=0.5, highest=50, unit=0.01, precision=Precision(relative=relative))
    judged = measure_all(lambda rate: rate <= optimum, search)
    around = bracket(judged)
    assert all(rate == round(rate, 2) for rate in judged)
    if around.passing is None:
        assert optimum < 0.5
    elif around.failing is None:
        assert around.passing == 50
    else:
        assert around.passing <= optimum < around.failing
        assert around.failing - around.passing <= max(0.011, relative * around.passing)


@given(st.floats(0.011, 5.0), st.floats(1.0, 300.0), st.floats(0.0, 1500.0))
def test_a_range_of_any_rates_comes_to_an_end(lowest, factor, optimum):
    search = SearchRange(lowest=lowest, highest=lowest * factor, unit=0.01, precision=Precision(relative=0.05))
    judged = measure_all(lambda rate: rate <= optimum, search)
    assert 1 <= len(judged) <= 2 * log2(max(2, search.ticks(lowest * factor))) + 2


def test_noise_counts_against_the_load():
    around = bracket({1: True, 2: True, 4: False, 8: True, 16: False})
    assert (around.passing, around.failing, around.contradicted) == (2, 4, (8,))
    assert next_load({1: True, 2: True, 4: False, 8: True}, SearchRange(lowest=1, highest=64)) == 3


def test_a_range_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"search range 4\.\.2"):
        SearchRange(lowest=4, highest=2)
