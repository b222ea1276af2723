"""Columns of one matrix are merged, others are not."""

import pytest
import torch
from torch import Tensor

from llmb.ops.tensor_layout import merge_columns

ROWS = torch.arange(60.0).view(5, 12)
OTHER = ROWS.clone()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_columns_side_by_side_are_one_matrix(device: str) -> None:
    rows = ROWS.to(device)
    (merged,) = merge_columns(rows[:, 2:].split((4, 1, 3, 2), dim=1)[:3])
    assert (merged.shape, merged.stride(), merged.storage_offset()) == ((5, 8), (12, 1), 2)
    assert merged.untyped_storage()._cdata == rows.untyped_storage()._cdata
    assert device == "meta" or torch.equal(merged, rows[:, 2:10])
    assert merge_columns((rows,))[0].shape == rows.shape


@pytest.mark.parametrize(
    "matrices",
    [
        (ROWS[:, :4], ROWS[:, 5:8]),
        (ROWS[:, 4:8], ROWS[:, :4]),
        (ROWS[:, :4], OTHER[:, 4:8]),
        (ROWS[:, :4], ROWS[1:, 4:8]),
        (ROWS[:4, :4], ROWS[:, 4:8]),
        (ROWS[:, :4], ROWS[:, 4:8].view(torch.int32)),
        (ROWS[:, ::2], ROWS[:, 6::2]),
        (ROWS.flatten()[:4].view(1, 4), ROWS.flatten()[4:8].view(1, 4)),  # rows of one matrix, not columns
    ],
    ids=["a gap", "another order", "another matrix", "other rows", "fewer rows", "another dtype", "steps", "rows"],
)
def test_others_stay_as_they_are(matrices: tuple[Tensor, ...]) -> None:
    merged = merge_columns(matrices)
    assert len(merged) == 2
    assert all(a is b for a, b in zip(merged, matrices, strict=True))
