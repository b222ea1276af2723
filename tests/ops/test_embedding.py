"""Backward of the embedding lookup; shards of the vocabulary: tests/offload/test_training_equals.py."""

import torch

from llmb.ops.embedding.embedding import embedding_backward_, sort_tokens


def test_gradient_of_a_frequent_token_is_exact_in_bf16():
    tokens, dout = torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 8, dtype=torch.bfloat16)
    dweight = torch.zeros(1, 8, dtype=torch.bfloat16)
    embedding_backward_(dout, sort_tokens(tokens), dweight, 0, accumulate=False)
    assert dweight.tolist() == [[1000.0] * 8]
