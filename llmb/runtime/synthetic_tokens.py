"""Synthetic tokens: a pure function of the seed, the sequence's number and the position.

Each token is a hash of its place, so any rank can make any part of the global batch: the batch is the same however it
is cut into ranks and micro-batches, and the same on a CPU and a GPU. Small token numbers are more frequent than large
ones, as in natural text, so a model has something to learn: the loss falls from ln(vocab) by about 0.9.
"""

import torch
from torch import Tensor

_WEYL = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, multiplier: the SplitMix64 finaliser


def synthetic_tokens(seed: int, first: int, shape: tuple[int, int], vocab: int, device: torch.device) -> Tensor:
    """Sequences number `first` and following as int64, in the shape (sequences, tokens of each)."""
    sequences, length = shape
    places = torch.arange(first * length, (first + sequences) * length, dtype=torch.int64, device=device)
    hashed = _hash(places + _signed(seed * _WEYL))
    share = _shift(hashed, 11).double() / 2**53  # uniform in [0, 1)
    return (share * share * share * vocab).long().view(shape)


def _hash(numbers: Tensor) -> Tensor:
    mixed = numbers * _signed(_WEYL)
    for shift, multiplier in _MIX:
        mixed = (mixed ^ _shift(mixed, shift)) * _signed(multiplier)
    return mixed


def _shift(numbers: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros; torch's own repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
