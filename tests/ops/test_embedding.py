"""Embedding lookup and backward over shards of the vocabulary: the reference against torch's own, and kernel blocks."""

import pytest
import torch
from torch import Tensor

from llmb.ops.embedding.embedding import embedding_backward_, embedding_gather_, sort_tokens

VOCABULARY, CHANNELS = 23, 40
SHARDS = [(0, 10), (10, 23)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "end"), SHARDS)
def test_kernels_on_rows_of_several_blocks_with_strides(first, end, dtype, device, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("llmb.ops.embedding.embedding_triton.BLOCK_C", 16)
    tokens, weight = repeated_tokens().to(device), randn(end - first, CHANNELS).to(device, dtype)
    outs = [torch.full((len(tokens), CHANNELS + 3), 7.0, dtype=dtype, device=device) for _ in range(2)]
    for gather, out in zip((embedding_gather_.triton, embedding_gather_.reference), outs, strict=True):
        gather(tokens, weight, first, out[:, :CHANNELS])
    assert torch.equal(*outs)
    dout, order = randn(len(tokens), CHANNELS + 1, seed=1).to(device, dtype)[:, :CHANNELS], sort_tokens(tokens)
    for accumulate in (False, True):
        actual, expected = weight.clone(), weight.clone()
        embedding_backward_.triton(dout, order, actual, first, accumulate)
        embedding_backward_.reference(dout, order, expected, first, accumulate)
        torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
