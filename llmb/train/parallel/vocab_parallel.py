"""Both ends of the network with the vocabulary split over ranks: each has some rows of the embedding and of the head.

The embedding gives zeros for tokens whose rows are elsewhere, and the sum over ranks, of which each keeps its piece of
the sequence, is the stream. For the loss every rank takes all tokens through its rows of the head; per chunk of tokens
two numbers a token are exchanged, and no rank ever has the logits of the whole vocabulary.

Shapes: B sequences, T tokens, C hidden width, N tokens of all sequences, V entries of the vocabulary on this rank.
"""

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.chunked_loss import AGREED_TOKENS, chunked_cross_entropy
from llmb.train.parallel.activation_collectives import gathered, scattered_sum


class RowsEmbedding(nn.Embedding):
    """An embedding that has the rows from `first` on: other tokens give zeros."""

    first: int

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows_VC = self.weight
        places_BT = tokens_BT - self.first
        elsewhere_BT = (places_BT < 0) | (places_BT >= len(rows_VC))
        found_BTC = F.embedding(places_BT.masked_fill(elsewhere_BT, 0), rows_VC)
        return found_BTC.masked_fill(elsewhere_BT[..., None], 0.0)


def split_vocabulary(part: Network, tp: DeviceMesh) -> None:
    """Make embedding and loss, where the part has them, work with this rank's rows; their weights are not touched."""
    first = part.model.vocab // tp.size() * tp.get_local_rank()
    if part.embedding is not None:
        part.embedding.__class__ = RowsEmbedding
        embedding = cast(RowsEmbedding, part.embedding)
        embedding.first = first
        # After the hook that rounds to the stream's format: only one summand is not zero, so nothing is lost by that.
        embedding.register_forward_hook(lambda _module, _args, x_BTC: scattered_sum(x_BTC, tp, dim=1))
    part.cross_entropy = partial(split_cross_entropy, tp=tp, first=first)


def split_cross_entropy(
    x_BTC: Tensor, rows_VC: Tensor, labels_BT: Tensor, tp: DeviceMesh, first: int, chunk: int = AGREED_TOKENS
) -> Tensor:
    """The mean loss over all tokens, the same on every rank, of a stream of which each rank has a piece.

    The pieces are gathered one after the other rather than into whole sequences, and the labels dealt alike: the loss
    is a sum over tokens in any order, and the stream need not be copied.
    """
    hidden_NC = gathered(x_BTC.flatten(0, 1), tp, dim=0)
    labels_N = labels_BT.unflatten(1, (tp.size(), -1)).transpose(0, 1).flatten()
    return chunked_cross_entropy(hidden_NC, rows_VC, labels_N, chunk, first, partial(_agree, tp))


def _agree(tp: DeviceMesh, log_total_N1: Tensor, wanted_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum over all logits, and the label's logit, from every rank's own; one exchange."""
    both_2N1 = torch.stack((log_total_N1, wanted_N1))
    log_totals, wanted = gathered(both_2N1[None], tp, dim=0).unbind(1)
    return log_totals.logsumexp(dim=0), wanted.sum(dim=0)
