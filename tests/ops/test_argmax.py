"""Argmax by Triton and by torch: ties and chunk sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.ops.sampling.argmax import argmax

pytest.importorskip("triton")
from llmb.ops.sampling.argmax_triton import SHORT_CHUNK


@given(
    rows=st.integers(0, 3),
    width=st.sampled_from([1, 2, 97, SHORT_CHUNK, SHORT_CHUNK + 1, 5000]),
    values=st.sampled_from([1, 3, 10**6]),  # few values: many ties
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_ties_give_the_first_index(rows: int, width: int, values: int, seed: int, device: torch.device) -> None:
    x = torch.randint(-values, values, (rows, width), generator=torch.Generator().manual_seed(seed)).float().to(device)
    index = argmax.triton(x)
    assert index.dtype is torch.int64
    assert torch.equal(index, x.argmax(dim=-1))


def test_many_rows_use_longer_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr("llmb.ops.sampling.argmax_triton.FEW_ROWS", 1)
    x = torch.randn(3, 9000, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    assert torch.equal(argmax.triton(x), x.argmax(dim=-1))
