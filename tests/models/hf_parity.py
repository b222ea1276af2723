"""Comparison of a network with its reference: closeness of tensors, greedy decoding token by token."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_near(actual: Tensor, expected: Tensor, label: str, tolerance: float) -> None:
    """Assert that the largest error, relative to the largest value, is below the tolerance."""
    assert actual.shape == expected.shape
    assert expected.abs().max() > 0, f"{label}: the reference is all zero, nothing is compared"
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{label}: {error:.2e}"


def greedy_decode(logits: Callable[[Tensor], Tensor], tokens: Tensor, count: int = 16) -> list[list[int]]:
    """Append the likeliest next token `count` times, recomputing the whole sequence each time."""
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat((tokens, logits(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens.tolist()
