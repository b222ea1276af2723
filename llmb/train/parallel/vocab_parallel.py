"""Vocabulary parallelism: each rank has a range of rows of the embedding and of the output head.

The embedding gives zeros for tokens of other ranks' rows, and a reduce-scatter along the sequence gives the residual.
For the loss every rank computes the logits of all tokens for its rows, chunk by chunk; two numbers per token are
all-gathered, and no rank ever has the logits of the full vocabulary.

Shapes: B sequences, T tokens, C hidden width, N tokens of all sequences, V entries of the vocabulary on this rank.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.chunked_loss import CHUNK_TOKENS, chunked_cross_entropy
from llmb.train.module_class import use_class
from llmb.train.parallel.activation_collectives import all_gather, reduce_scatter
from llmb.train.precision import FusedEmbedding


def apply_vocab_parallel(model_part: Network, tp: DeviceMesh) -> None:
    """Make embedding and loss, where the model part has them, use this rank's rows; weights are not sharded here."""
    first = model_part.model.vocab // tp.size() * tp.get_local_rank()
    if model_part.embedding is not None:
        use_class(model_part.embedding, FusedEmbedding, first_row=first)
        # After the hook that casts to bf16: only one summand is nonzero, so the sum in bf16 is exact.
        model_part.embedding.register_forward_hook(lambda _module, _args, x_BTC: reduce_scatter(x_BTC, tp, dim=1))
    model_part.cross_entropy = partial(vocab_parallel_cross_entropy, tp=tp, first=first)


def vocab_parallel_cross_entropy(
    x_BTC: Tensor,
    rows_VC: Tensor,
    labels_BT: Tensor,
    tp: DeviceMesh,
    first: int,
    chunk: int = CHUNK_TOKENS,
    accum_dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
) -> Tensor:
    """Return the mean loss over all tokens, equal on every rank, of hidden states sharded along the sequence.

    The shards are concatenated in rank order rather than into sequences, and the labels likewise: the loss is a sum
    over tokens in any order, and no transposing copy is needed.
    """
    hidden_NC = all_gather(x_BTC.flatten(0, 1), tp, dim=0)
    labels_N = labels_BT.unflatten(1, (tp.size(), -1)).transpose(0, 1).flatten()
    return chunked_cross_entropy(
        hidden_NC, rows_VC, labels_N, chunk, first, partial(_combine_lse, tp), accum_dtype, softcap
    )


def _combine_lse(tp: DeviceMesh, both_2N: Tensor) -> tuple[Tensor, Tensor]:
    """Combine every rank's logsumexps and label logits, with one all-gather."""
    lse_RN, label_logits_RN = all_gather(both_2N[None], tp, dim=0).unbind(1)
    return lse_RN.logsumexp(dim=0), label_logits_RN.sum(dim=0)
