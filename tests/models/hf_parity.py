"""How a network is compared with its reference: tensors near one another, greedy decoding token for token."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_near(ours: Tensor, theirs: Tensor, what: str, tolerance: float) -> None:
    """The largest error, relative to the largest value, is below the tolerance, and there is something to compare."""
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0, f"{what}: the reference is all zero, nothing is compared"
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error < tolerance, f"{what}: {error:.2e}"


def greedily(logits: Callable[[Tensor], Tensor], tokens: Tensor, count: int = 16) -> list[list[int]]:
    """The tokens continued by the likeliest next one, `count` times, the whole text computed anew each time."""
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat((tokens, logits(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens.tolist()
