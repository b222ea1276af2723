"""Attention metadata of a step: which tokens belong to which sequence, and where it lies in a paged KV cache.

Shapes: N tokens, P sequences, M blocks of the longest sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Sequences of a step, decodes first. Padding sequences have no tokens, or a length of 0."""

    cu_seqlens_P1: Tensor  # int32: first token of each sequence among the N; the last is N
    seq_lens_P: Tensor  # int32: tokens of the sequence after this step, which its newest token attends to
    block_table_PM: Tensor  # int32: its blocks, in order; entries beyond them are never read
    num_decodes: int  # the first so many sequences have one token each
    max_query_len: int  # most tokens of a sequence in this step
    max_seq_len: int  # at least the largest of seq_lens_P
    prefill_chunks: tuple[tuple[int, int], ...] = ()  # (first position, tokens) of the other sequences, on the host
    padded_prefills: int = 0  # in a CUDA graph: most prefill chunks, whose sizes only the device has

    def sequences(self, block_tokens: int) -> Iterator[tuple[slice, int, Tensor]]:
        """Yield tokens, length and blocks of each sequence that is not padding; reads sizes on the host."""
        starts, lengths = self.cu_seqlens_P1.tolist(), self.seq_lens_P.tolist()
        for index, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            if start < end and length:
                yield slice(start, end), length, self.block_table_PM[index, : -(-length // block_tokens)].long()


def causal_mask(queries: int, keys: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return which keys [queries, keys] the last `queries` of `keys` tokens attend to.

    With a sliding window a token attends to itself and the `window` - 1 tokens before it.
    """
    mask_QT = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask_QT if window is None else mask_QT.triu(keys - queries - window + 1)
