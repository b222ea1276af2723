"""Rows that expert-parallel ranks exchange."""

import pytest

from llmb.perfmodel.expert_capacity import ROW_ALIGNMENT, pair_capacity


@pytest.mark.parametrize(
    ("rows", "experts", "ep"), [(4096, 8, 8), (100, 8, 4), (24, 16, 2), (1, 8, 8), (8190, 256, 64)]
)
def test_balanced_routing_fits_a_factor_of_one_and_every_routing_that_of_ep(rows: int, experts: int, ep: int) -> None:
    capacity = pair_capacity(rows, experts, ep, 1.0)
    first_rank = sum(row % experts < experts // ep for row in range(rows))  # round-robin
    assert first_rank <= capacity <= -(-rows // experts) * experts // ep + ROW_ALIGNMENT
    assert capacity % ROW_ALIGNMENT == 0 or capacity == rows
    assert pair_capacity(rows, experts, ep, ep) == rows
    assert pair_capacity(rows, experts, 1, 1.25) == rows


def test_factor_is_relative_to_an_even_load() -> None:
    assert [pair_capacity(4096, 8, 8, factor) for factor in (1.0, 1.25, 2.5)] == [512, 640, 1280]
