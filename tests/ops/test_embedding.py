"""Rows of a vocabulary there and back: the kernels against plain torch, and that one against torch's own embedding."""

import pytest
import torch
from torch import Tensor

from llmb.ops.embedding.embedding import add_rows_, add_rows_reference_, gather_rows_, gather_rows_reference_, in_order

VOCABULARY, CHANNELS = 23, 40
PARTS = [(0, 10), (10, 23)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_tokens() -> Tensor:
    tokens = torch.randint(VOCABULARY, (37,), generator=torch.Generator().manual_seed(2))
    tokens[::2] = 4  # a word that recurs more often than a program sums at once
    return tokens


def test_parts_together_are_the_embedding_and_its_gradient():
    tokens, weight = some_tokens(), drawn(VOCABULARY, CHANNELS).requires_grad_()
    wanted = torch.nn.functional.embedding(tokens, weight)
    dout = drawn(*wanted.shape, seed=1)
    wanted.backward(dout)
    out = torch.full_like(wanted, torch.nan)
    dweight = torch.full_like(weight, torch.nan)
    for first, end in PARTS:
        gather_rows_(tokens, weight.detach()[first:end], first, out)
        add_rows_(dout, in_order(tokens), dweight[first:end], first, True)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    torch.testing.assert_close(dweight, weight.grad)
    add_rows_(dout, in_order(tokens), dweight, 0, False)
    torch.testing.assert_close(dweight, 2 * weight.grad)


def test_a_frequent_word_loses_nothing_in_bf16():
    tokens, dout = torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 8, dtype=torch.bfloat16)
    dweight = torch.zeros(1, 8, dtype=torch.bfloat16)
    add_rows_(dout, in_order(tokens), dweight, 0, True)
    assert dweight.tolist() == [[1000.0] * 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "end"), PARTS)
def test_the_kernels_equal_plain_torch(first, end, dtype, device, monkeypatch):
    from llmb.ops.embedding import embedding_triton

    monkeypatch.setattr(embedding_triton, "STRETCH", 16)  # so that a row has several
    tokens, weight = some_tokens().to(device), drawn(end - first, CHANNELS).to(device, dtype)
    outs = [torch.full((len(tokens), CHANNELS + 3), 7.0, dtype=dtype, device=device) for _ in range(2)]
    for gather, out in zip((embedding_triton.gather_rows_triton_, gather_rows_reference_), outs, strict=True):
        gather(tokens, weight, first, out[:, :CHANNELS])
    assert torch.equal(*outs)
    dout, order = drawn(len(tokens), CHANNELS + 1, seed=1).to(device, dtype)[:, :CHANNELS], in_order(tokens)
    for fresh in (True, False):
        found, wanted = weight.clone(), weight.clone()
        embedding_triton.add_rows_triton_(dout, order, found, first, fresh)
        add_rows_reference_(dout, order, wanted, first, fresh)
        torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
