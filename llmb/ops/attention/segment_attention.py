"""Causal attention of a chunk of tokens, whose documents may have begun in earlier chunks, and its way back.

    out_NHD, lse_HN = attend(q_NHD, k_TGD, v_TGD, spans, scale)
    attend_backward(dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, spans, dq_NHD, dk_TGD, dv_TGD, fresh, scale)

A span's scores are a triangle over its own keys and, where its document began earlier, a rectangle over the keys before
them. The triangles of all spans are one call of a kernel, each rectangle another, and the two are merged by their
log-sum-exps. So no kernel has to know of positions, and the fastest one there is can be taken (`attention_block.py`).

Shapes: N queries of the chunk, T keys of its context, H heads, G heads of keys, D width of a head.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.attention.attention_block import CUDNN, FLASH, PLAIN, AttentionKernel
from llmb.ops.attention.merge_lse import merge_

# Keys of a rectangle that are taken at once. On the way back cuDNN holds slopes of as many keys for each head of the
# queries; with fewer keys the queries' slopes are rounded and added more often.
KEYS_AT_ONCE = 65536
RECURRING = 256  # a document's earlier tokens in multiples of this come from equal chunks, not from its own length


class Span(NamedTuple):
    """A stretch of one document in a chunk. Spans tile their chunk, which lies in one piece in the context."""

    first: int  # rows [first, end) of the chunk
    end: int
    past: int  # rows [past, here) of the context are seen wholly
    here: int  # rows [here, here + end - first) of the context are the span's own, seen causally


def spans_of(beginnings: Sequence[int], first: int, end: int) -> tuple[Span, ...]:
    """The spans of a chunk, rows [first, end) of a context in which documents begin at these rows, the first at 0."""
    documents = beginnings[bisect_right(beginnings, first) - 1 : bisect_left(beginnings, end)]
    found = []
    for past, stop in zip(documents, [*documents[1:], end], strict=True):
        here = max(past, first)
        found.append(Span(here - first, stop - first, past, here))
    return tuple(found)


def rows_of(spans: Sequence[Span]) -> slice:
    """Where the chunk lies in its context."""
    assert [0, *(span.end for span in spans[:-1])] == [span.first for span in spans], "spans tile their chunk"
    assert len({span.here - span.first for span in spans}) == 1, "a chunk lies in one piece in its context"
    return slice(spans[0].here, spans[0].here + spans[-1].end)


def attend(
    q_NHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    spans: Sequence[Span],
    scale: float,
    keys_at_once: int = KEYS_AT_ONCE,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """What was seen, and the log-sum-exp of each row's scaled scores in fp32: where these are wanted, or as the kernel
    made them, which spares a copy."""
    kernel, own, lengths = kernel_for(q_NHD, spans), rows_of(spans), _lengths(spans)
    out_NHD, lse_HN = kernel.forward(q_NHD, k_TGD[own], v_TGD[own], lengths, True, scale)
    if into is not None:
        out_NHD, lse_HN = (place.copy_(made) for place, made in zip(into, (out_NHD, lse_HN), strict=True))
    for rows, keys in _rectangles(spans, keys_at_once):
        length = (rows.stop - rows.start,)
        more_NHD, more_lse_HN = kernel.forward(q_NHD[rows], k_TGD[keys], v_TGD[keys], length, False, scale)
        merge_(out_NHD[rows], lse_HN[:, rows], more_NHD, more_lse_HN)
        del more_NHD, more_lse_HN  # before the next is made
    return out_NHD, lse_HN


def attend_backward(
    dout_NHD: Tensor,
    q_NHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_NHD: Tensor,
    lse_HN: Tensor,
    spans: Sequence[Span],
    dq_NHD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
    fresh: bool,
    scale: float,
    keys_at_once: int = KEYS_AT_ONCE,
) -> None:
    """Sets `dq`, and adds to `dk` and `dv` for all keys that were seen; dq may be heads inside wider rows.

    Fresh: this is the last chunk of its context, the first on the way back, and dk and dv have no values yet.
    """
    kernel, own = kernel_for(q_NHD, spans), rows_of(spans)
    own_q_NHD, own_dk_NGD, own_dv_NGD = squares_backward(
        dout_NHD, q_NHD, k_TGD[own], v_TGD[own], out_NHD, lse_HN, spans, scale
    )
    dq_NHD.copy_(own_q_NHD)
    for slope_TGD, own_NGD in ((dk_TGD, own_dk_NGD), (dv_TGD, own_dv_NGD)):
        if fresh:
            slope_TGD[: own.start].zero_()
            slope_TGD[own].copy_(own_NGD)
        else:
            slope_TGD[own].add_(own_NGD)
    del own_q_NHD, own_dk_NGD, own_dv_NGD, own_NGD
    for rows, keys in _rectangles(spans, keys_at_once):
        more_q_NHD, more_dk_KGD, more_dv_KGD = kernel.backward(
            dout_NHD[rows], q_NHD[rows], k_TGD[keys], v_TGD[keys], out_NHD[rows], lse_HN[:, rows],
            (rows.stop - rows.start,), False, scale,
        )  # fmt: skip
        dq_NHD[rows].add_(more_q_NHD)
        dk_TGD[keys].add_(more_dk_KGD)
        dv_TGD[keys].add_(more_dv_KGD)
        del more_q_NHD, more_dk_KGD, more_dv_KGD


def squares_backward(
    dout_NHD: Tensor, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    spans: Sequence[Span], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New slopes of queries, and of the chunk's own keys and values by what its own queries saw of them."""
    kernel = kernel_for(q_NHD, spans)
    return kernel.backward(dout_NHD, q_NHD, k_NGD, v_NGD, out_NHD, lse_HN, _lengths(spans), True, scale)


def kernel_for(q_NHD: Tensor, spans: Sequence[Span]) -> AttentionKernel:
    """Which kernel computes this chunk: a matter of its device, format and spans only, so equal runs stay equal."""
    width = q_NHD.shape[-1]
    if not q_NHD.is_cuda or q_NHD.dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return PLAIN
    if _has_fast_cudnn(q_NHD.device) and width <= 128 and _recurs(spans):
        return CUDNN
    return FLASH


@cache
def _has_fast_cudnn(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _recurs(spans: Sequence[Span]) -> bool:
    """Whether chunks like this come again and again: whole sequences of one length, or equal parts of long ones."""
    return len(set(_lengths(spans))) == 1 and all((span.here - span.past) % RECURRING == 0 for span in spans)


def _lengths(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(span.end - span.first for span in spans)


def _rectangles(spans: Sequence[Span], keys_at_once: int) -> Iterator[tuple[slice, slice]]:
    """Rows of the chunk, and those of the context that they see wholly; the latter in pieces."""
    for span in spans:
        for first in range(span.past, span.here, keys_at_once):
            yield slice(span.first, span.end), slice(first, min(first + keys_at_once, span.here))
