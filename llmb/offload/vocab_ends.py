"""Both ends of a Llama over one chunk of tokens: the embedding there and back, and the head with its loss.

    embed(tokens_N, parts, out_NC)
    embed_backward(dstream_NC, tokens_N, dparts, fresh)
    head_loss(inp_NC, norm_C, eps, parts, labels_N, scale, dstream_NC, dparts, dnorm_C, fresh, losses_N, loss_tokens)

A vocabulary's matrix comes in parts, one behind another, since each has its own buffer. The logits of `loss_tokens`
tokens exist at a time; their slopes are written over them, and are used up before the next logits are made. With tied
embeddings the head goes back first, so the embedding adds to the same gradients: there it is not fresh.

Shapes: N tokens of the chunk, C hidden width, V vocabulary.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from llmb.models.llama_layer.linear_gemms import Products
from llmb.ops.embedding.embedding import add_rows_, gather_rows_, in_order
from llmb.ops.loss.cross_entropy import cross_entropy_slope_
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward


def embed(tokens_N: Tensor, parts: Sequence[Tensor], out_NC: Tensor) -> None:
    """The stream as it enters the first layer."""
    for rows, weight in _with_rows(parts):
        gather_rows_(tokens_N, weight, rows.start, out_NC)


def embed_backward(dstream_NC: Tensor, tokens_N: Tensor, dparts: Sequence[Tensor], fresh: bool) -> None:
    """The embedding's gradients, set if fresh, otherwise added to; the same call gives the same bits."""
    tokens = in_order(tokens_N)
    for rows, dweight in _with_rows(dparts):
        add_rows_(dstream_NC, tokens, dweight, rows.start, fresh)


def head_loss(
    inp_NC: Tensor,
    norm_C: Tensor,
    eps: float,
    parts: Sequence[Tensor],
    labels_N: Tensor,
    scale: float | Tensor,
    dstream_NC: Tensor,
    dparts: Sequence[Tensor],
    dnorm_C: Tensor,
    fresh: bool,
    losses_N: Tensor,
    loss_tokens: int,
    products: Products | None = None,
) -> None:
    """Each token's loss, and the gradients of `scale` times their sum.

    A label below 0 does not count. The gradients of head and norm are set if fresh, otherwise added to.
    """
    products = Products() if products is None else products
    for first in range(0, len(inp_NC), loss_tokens):
        some = slice(first, first + loss_tokens)
        x_NC = rms_norm(inp_NC[some], norm_C, eps)
        logits_NV = x_NC.new_empty(len(x_NC), sum(map(len, parts)))
        for rows, weight in _with_rows(parts):
            products.forward(x_NC, weight, out=logits_NV[:, rows])
        cross_entropy_slope_(logits_NV, labels_N[some], scale, losses_N[some])
        for rows, dweight in _with_rows(dparts):
            products.weight_gradient(logits_NV[:, rows], x_NC, dweight, fresh)
        for rows, weight in _with_rows(parts):  # the normed stream is done with: its slope lies in its memory
            products.input_gradient(logits_NV[:, rows], weight, out=x_NC, onto=x_NC if rows.start else None)
        rms_norm_backward(x_NC, inp_NC[some], norm_C, eps, None, dstream_NC[some], dnorm_C, fresh)
        fresh = False
        del x_NC, logits_NV  # before the next are made


def _with_rows(parts: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Each part, and its rows of the whole vocabulary."""
    first = 0
    for part in parts:
        yield slice(first, first + len(part)), part
        first += len(part)
