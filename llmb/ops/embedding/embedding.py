"""The rows of a vocabulary that tokens name, and the way back, for a part of the vocabulary at a time.

    gather_rows_(tokens_N, weight_RC, first, out_NC)            # rows of other parts' tokens stay as they are
    add_rows_(dout_NC, in_order(tokens_N), dweight_RC, first, fresh=True)

On the way back a word's slopes are summed in fp32 in the order of its tokens and rounded once: torch's own ways add
one by one in the format of the gradient, where in bf16 a frequent word's last slopes vanish, and in any order. Shapes:
N tokens, C channels, R rows of the vocabulary from `first` on.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


class InOrder(NamedTuple):
    """Tokens sorted, so that equal ones are neighbours."""

    tokens_N: Tensor
    places_N: Tensor  # where each was before
    ends_N: Tensor  # for each, where its equals end


def in_order(tokens_N: Tensor) -> InOrder:
    """Sorted on the device; equal tokens keep their order."""
    sorted_N, places_N = torch.sort(tokens_N, stable=True)
    return InOrder(sorted_N, places_N, torch.searchsorted(sorted_N, sorted_N, right=True))


def gather_rows_(tokens_N: Tensor, weight_RC: Tensor, first: int, out_NC: Tensor) -> None:
    """out[n] = weight[tokens[n] - first] where there is such a row."""
    if takes_triton(weight_RC):
        from llmb.ops.embedding.embedding_triton import gather_rows_triton_

        gather_rows_triton_(tokens_N, weight_RC, first, out_NC)
    else:
        gather_rows_reference_(tokens_N, weight_RC, first, out_NC)


def gather_rows_reference_(tokens_N: Tensor, weight_RC: Tensor, first: int, out_NC: Tensor) -> None:
    """The same in plain torch."""
    here_N = (tokens_N >= first) & (tokens_N < first + len(weight_RC))
    out_NC[here_N] = weight_RC[tokens_N[here_N] - first]


def add_rows_(dout_NC: Tensor, tokens: InOrder, dweight_RC: Tensor, first: int, fresh: bool) -> None:
    """dweight[r] = (fresh: 0, otherwise dweight[r]) + the sum of dout over the tokens first + r."""
    if takes_triton(dweight_RC):
        from llmb.ops.embedding.embedding_triton import add_rows_triton_

        add_rows_triton_(dout_NC, tokens, dweight_RC, first, fresh)
    else:
        add_rows_reference_(dout_NC, tokens, dweight_RC, first, fresh)


def add_rows_reference_(dout_NC: Tensor, tokens: InOrder, dweight_RC: Tensor, first: int, fresh: bool) -> None:
    """The same in plain torch."""
    here_N = (tokens.tokens_N >= first) & (tokens.tokens_N < first + len(dweight_RC))
    sums_RC = torch.zeros_like(dweight_RC, dtype=torch.promote_types(dweight_RC.dtype, torch.float32))
    sums_RC.index_add_(0, tokens.tokens_N[here_N] - first, dout_NC[tokens.places_N[here_N]].to(sums_RC.dtype))
    dweight_RC.copy_(sums_RC if fresh else sums_RC + dweight_RC)
