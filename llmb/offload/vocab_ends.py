"""Both vocabulary ends of a model over one chunk of tokens: the embedding, and the head with its loss, with backward.

    embed(tokens_N, shards, out_NC, scale)
    embed_backward(d_residual_NC, tokens_N, dshards, accumulate, scale)
    head_loss(input_NC, norm_C, eps, shards, labels_N, scale, d_residual_NC, dshards, dnorm_C, accumulate, losses_N, n,
              logit_scale, logit_softcap)

A vocabulary matrix comes in shards of consecutive rows, since each has its own buffer. The logits of `loss_tokens`
tokens exist at a time; their gradients overwrite them, and are consumed before the next logits are computed. With tied
embeddings the head's backward comes first, so the embedding accumulates into the same gradients.

Shapes: N tokens of the chunk, C hidden width, V vocabulary.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.ops.embedding.embedding import embedding_backward_, embedding_gather_, sort_tokens
from llmb.ops.loss.cross_entropy import cross_entropy_grad_
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward


def embed(tokens_N: Tensor, shards: Sequence[Tensor], out_NC: Tensor, scale: float = 1.0) -> None:
    """Write the input of the first layer, the embedding times `scale`."""
    for rows, weight in _with_rows(shards):
        embedding_gather_(tokens_N, weight, rows.start, out_NC)
    if scale != 1.0:
        out_NC.mul_(scale)


def embed_backward(
    d_residual_NC: Tensor, tokens_N: Tensor, dshards: Sequence[Tensor], accumulate: bool, scale: float = 1.0
) -> None:
    """Write the embedding's gradients, or add to them; the same call gives the same bits."""
    tokens = sort_tokens(tokens_N)
    if scale != 1.0:
        d_residual_NC = d_residual_NC * scale
    for rows, dweight in _with_rows(dshards):
        embedding_backward_(d_residual_NC, tokens, dweight, rows.start, accumulate)


def head_loss(
    input_NC: Tensor,
    norm_C: Tensor,
    eps: float,
    shards: Sequence[Tensor],
    labels_N: Tensor,
    scale: float | Tensor,
    d_residual_NC: Tensor,
    dshards: Sequence[Tensor],
    dnorm_C: Tensor | None,
    accumulate: bool,
    losses_N: Tensor,
    loss_tokens: int,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> None:
    """Compute each token's loss, and the gradients of `scale` times their sum.

    Tokens with a negative label are ignored. The gradients of head and norm are written, or added to; a frozen head has
    no `dshards`, a frozen norm no `dnorm`. Logits are
    multiplied by `logit_scale`, and then soft-capped to +-logit_softcap if given.
    """
    gemms = LinearGemms()
    for first in range(0, len(input_NC), loss_tokens):
        rows_of_chunk = slice(first, first + loss_tokens)
        x_NC = rms_norm(input_NC[rows_of_chunk], norm_C, eps)
        if logit_scale != 1.0:
            x_NC.mul_(logit_scale)
        logits_NV = x_NC.new_empty(len(x_NC), sum(map(len, shards)))
        for rows, weight in _with_rows(shards):
            gemms.forward(x_NC, weight, out=logits_NV[:, rows])
        cross_entropy_grad_(logits_NV, labels_N[rows_of_chunk], scale, losses_N[rows_of_chunk], logit_softcap)
        for rows, dweight in _with_rows(dshards):
            gemms.weight_gradient(logits_NV[:, rows], x_NC, dweight, accumulate)
        for rows, weight in _with_rows(shards):  # the normed input is no longer needed: its gradient overwrites it
            gemms.input_gradient(logits_NV[:, rows], weight, out=x_NC, addend=x_NC if rows.start else None)
        if logit_scale != 1.0:
            x_NC.mul_(logit_scale)
        rms_norm_backward(
            x_NC, input_NC[rows_of_chunk], norm_C, eps, None, d_residual_NC[rows_of_chunk], dnorm_C, accumulate
        )
        accumulate = True
        del x_NC, logits_NV  # before the next are allocated


def _with_rows(shards: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield each shard with its rows of the whole vocabulary."""
    first = 0
    for shard in shards:
        yield slice(first, first + len(shard)), shard
        first += len(shard)
