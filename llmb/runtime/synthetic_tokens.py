"""Synthetic tokens: a pure function of the seed, the sequence index and the position.

Each token is a hash of its index, so any rank can generate any slice of the global batch: the batch is the same however
it is split into ranks and micro-batches, and the same on a CPU and a GPU. Small token ids are more frequent than large
ones, as in natural text, so a model has something to learn: the loss can fall to ln(vocab) - 0.9, and no
further, since a token says nothing about the next one.
"""

import torch
from torch import Tensor

_WEYL = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, multiplier: the SplitMix64 finalizer


def synthetic_tokens(seed: int, first: int, shape: tuple[int, int], vocab: int, device: torch.device) -> Tensor:
    """Return sequences `first` and following as int64 [sequences, tokens]."""
    sequences, length = shape
    indices = torch.arange(first * length, (first + sequences) * length, dtype=torch.int64, device=device)
    hashed = _hash(indices + _signed(seed * _WEYL))
    uniform = _shift(hashed, 11).double() / 2**53  # in [0, 1)
    return (uniform * uniform * uniform * vocab).long().view(shape)


def _hash(indices: Tensor) -> Tensor:
    mixed = indices * _signed(_WEYL)
    for shift, multiplier in _MIX:
        mixed = (mixed ^ _shift(mixed, shift)) * _signed(multiplier)
    return mixed


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's own shift is arithmetic."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Return the int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
