"""Embedding lookup and its backward."""

import torch
from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.embedding.embedding import embedding_backward_, embedding_gather_, sort_tokens
from op_cases import Arguments, cases, in_wider_rows, randn


# tokens, vocabulary, first row and rows of the shard, channels
@cases(
    embedding_gather_, (7, 10, 0, 10, 6), (33, 20, 5, 8, 1500), (1, 3, 2, 1, 1), (9, 4, 0, 4, 8, bfloat16), tolerance=0
)
def gather(
    g: Generator, d: device, n: int, vocab: int, first: int, rows: int, c: int, dtype: dtype = float32
) -> Arguments:
    tokens, weight = torch.randint(vocab, (n,), generator=g).to(d), randn(g, d, rows, c, dtype=dtype)
    return (tokens, weight, first, in_wider_rows(torch.full((n, c), 7.0, dtype=dtype, device=d))), {}


@cases(
    embedding_backward_, (7, 10, 0, 10, 6, True), (70, 3, 0, 3, 9, False), (33, 20, 5, 8, 1500, True), tolerance=2e-6
)
@cases(embedding_backward_, (40, 5, 0, 5, 8, False, bfloat16), (40, 5, 0, 5, 8, True, bfloat16), tolerance=2**-7)
def backward(
    g: Generator, d: device, n: int, vocab: int, first: int, rows: int, c: int, accumulate: bool, dtype: dtype = float32
) -> Arguments:
    tokens, dout = torch.randint(vocab, (n,), generator=g).to(d), in_wider_rows(randn(g, d, n, c, dtype=dtype))
    return (dout, sort_tokens(tokens), randn(g, d, rows, c, dtype=dtype), first, accumulate), {}
