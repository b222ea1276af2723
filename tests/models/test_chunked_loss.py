"""Chunked loss."""

import pytest
import torch
import torch.nn.functional as F

from llmb.models.chunked_loss import CHUNK_TOKENS, chunked_cross_entropy
from llmb.perfmodel import activation_memory


@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_chunked_loss_matches_cross_entropy(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(20, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    labels = torch.randint(50, (20,), generator=generator)
    expected_loss = F.cross_entropy(hidden @ weight.T, labels)
    expected = torch.autograd.grad(3.0 * expected_loss, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk)
    torch.testing.assert_close(loss, expected_loss)
    for actual, expected_grad in zip(torch.autograd.grad(3.0 * loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(actual, expected_grad, rtol=1e-5, atol=1e-6)


def test_memory_estimate_has_the_same_chunk_size() -> None:
    """It has its own constant: models and estimates do not import one another."""
    assert activation_memory.CHUNK_TOKENS == CHUNK_TOKENS


def test_chunked_loss_rejects_a_second_backward_pass() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = chunked_cross_entropy(hidden, torch.randn(9, 8, requires_grad=True), torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.005), (torch.bfloat16, 0.02)])
def test_head_gradient_accumulates_in_accum_dtype(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 16, generator=generator).bfloat16()
    weight = torch.randn(50, 16, generator=generator).bfloat16()
    labels = torch.randint(50, (256,), generator=generator)
    exact = weight.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ exact.T, labels), exact)
    head = weight.to(dtype).requires_grad_()
    for micro_batches in (1, 2):  # accumulated the second time
        chunked_cross_entropy(hidden, head, labels, 8, accum_dtype=dtype).backward()
        assert head.grad is not None
        assert head.grad.dtype == dtype
        assert (head.grad - micro_batches * expected).norm() / (micro_batches * expected).norm() < tolerance
