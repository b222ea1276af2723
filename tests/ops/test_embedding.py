"""Embedding lookup and backward over shards of the vocabulary: the reference against torch's own."""

import torch
from seeded_tensors import randn
from torch import Tensor

from llmb.ops.embedding.embedding import embedding_backward_, embedding_gather_, sort_tokens

VOCABULARY, CHANNELS = 23, 40
SHARDS = [(0, 10), (10, 23)]


def repeated_tokens() -> Tensor:
    tokens = torch.randint(VOCABULARY, (37,), generator=torch.Generator().manual_seed(2))
    tokens[::2] = 4  # a token that occurs more often than a program sums in one iteration
    return tokens


def test_shards_together_match_torch():
    tokens, weight = repeated_tokens(), randn(VOCABULARY, CHANNELS).requires_grad_()
    expected = torch.nn.functional.embedding(tokens, weight)
    dout = randn(*expected.shape, seed=1)
    expected.backward(dout)
    out = torch.full_like(expected, torch.nan)
    dweight = torch.full_like(weight, torch.nan)
    for first, end in SHARDS:
        embedding_gather_(tokens, weight.detach()[first:end], first, out)
        embedding_backward_(dout, sort_tokens(tokens), dweight[first:end], first, accumulate=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(dweight, weight.grad)
    embedding_backward_(dout, sort_tokens(tokens), dweight, 0, accumulate=True)
    torch.testing.assert_close(dweight, 2 * weight.grad)


def test_gradient_of_a_frequent_token_is_exact_in_bf16():
    tokens, dout = torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 8, dtype=torch.bfloat16)
    dweight = torch.zeros(1, 8, dtype=torch.bfloat16)
    embedding_backward_(dout, sort_tokens(tokens), dweight, 0, accumulate=False)
    assert dweight.tolist() == [[1000.0] * 8]
