"""Comparison of a network with its reference: closeness of tensors, a training step, greedy decoding token by token."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def assert_near(actual: Tensor, expected: Tensor, label: str, tolerance: float) -> None:
    """Assert that the largest error, relative to the largest value, is below the tolerance."""
    assert actual.shape == expected.shape
    assert expected.abs().max() > 0, f"{label}: the reference is all zero, nothing is compared"
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{label}: {error:.2e}"


def assert_forward_parity(network: nn.Module, reference: nn.Module, tokens: Tensor, tolerance: float) -> None:
    """Assert equal logits and loss of next-token prediction, and run both backward passes."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    their_logits = reference(inputs, use_cache=False).logits
    assert_near(network(inputs), their_logits, "logits", tolerance)
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    our_loss = network(inputs, labels)
    assert_near(our_loss, their_loss, "loss", tolerance)
    their_loss.backward()
    our_loss.backward()


def greedy_decode(logits: Callable[[Tensor], Tensor], tokens: Tensor, count: int = 16) -> list[list[int]]:
    """Append the likeliest next token `count` times, recomputing the whole sequence each time."""
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat((tokens, logits(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens.tolist()
