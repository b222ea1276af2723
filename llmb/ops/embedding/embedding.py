"""Embedding lookup and its backward, for a shard of the vocabulary.

    embedding_gather_(tokens_N, weight_RC, first, out_NC)       # tokens of other shards leave `out` as it is
    embedding_backward_(dout_NC, sort_tokens(tokens_N), dweight_RC, first, accumulate=False)

The backward sums the gradients of a token in fp32 in the order of its occurrences and rounds once: torch adds them one
by one in the dtype of the gradient, where in bf16 the last ones of a frequent token vanish, and in any order. Shapes:
N tokens, C channels, R rows of the vocabulary from `first` on.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import op


class SortedTokens(NamedTuple):
    """Tokens sorted, so that equal ones are neighbours."""

    tokens_N: Tensor
    index_N: Tensor  # position of each before sorting
    ends_N: Tensor  # for each, the end of the run of its equals


def sort_tokens(tokens_N: Tensor) -> SortedTokens:
    """Sort tokens on the device; equal tokens keep their order."""
    sorted_N, index_N = torch.sort(tokens_N, stable=True)
    return SortedTokens(sorted_N, index_N, torch.searchsorted(sorted_N, sorted_N, right=True))


@op
def embedding_gather_(tokens_N: Tensor, weight_RC: Tensor, first: int, out_NC: Tensor) -> None:
    """Write out[n] = weight[tokens[n] - first] where there is such a row."""
    mask_N = (tokens_N >= first) & (tokens_N < first + len(weight_RC))
    out_NC[mask_N] = weight_RC[tokens_N[mask_N] - first]


@op
def embedding_backward_(
    dout_NC: Tensor, tokens: SortedTokens, dweight_RC: Tensor, first: int, accumulate: bool
) -> None:
    """Set dweight[r], or add to it, the sum of dout over the tokens first + r."""
    mask_N = (tokens.tokens_N >= first) & (tokens.tokens_N < first + len(dweight_RC))
    sum_RC = torch.zeros_like(dweight_RC, dtype=torch.promote_types(dweight_RC.dtype, torch.float32))
    sum_RC.index_add_(0, tokens.tokens_N[mask_N] - first, dout_NC[tokens.index_N[mask_N]].to(sum_RC.dtype))
    dweight_RC.copy_(sum_RC + dweight_RC if accumulate else sum_RC)
