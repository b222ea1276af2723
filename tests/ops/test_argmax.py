"""The place of the largest number of each row, by Triton and by torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.ops.sampling.argmax_triton import SHORT_CHUNK, argmax_triton


@given(
    rows=st.integers(0, 3),
    width=st.sampled_from([1, 2, 97, SHORT_CHUNK, SHORT_CHUNK + 1, 5000]),
    values=st.sampled_from([1, 3, 10**6]),  # few values: many equals, of which the first is wanted
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_the_first_of_the_largest(rows: int, width: int, values: int, seed: int) -> None:
    x = torch.randint(-values, values, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    found = argmax_triton(x)
    assert found.dtype is torch.int64
    assert torch.equal(found, x.argmax(dim=-1))


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_numbers_that_are_none(value: float) -> None:
    x = torch.zeros(2, 3000)
    x[1, 2500] = value
    x[0] = value
    assert torch.equal(argmax_triton(x), x.argmax(dim=-1))


def test_many_rows_in_longer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.ops.sampling.argmax_triton.FEW_ROWS", 1)
    x = torch.randn(3, 9000, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(argmax_triton(x), x.argmax(dim=-1))
