"""What the parity with transformers does not show: the chunked loss, initial weights, refusals."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from llmb.config.spec import Experts, Model, Rope
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.chunked_loss import AGREED_TOKENS, CHUNK_TOKENS, chunked_cross_entropy
from llmb.perfmodel import activation_memory

MODEL = Model(
    name="small", architecture="llama", layers=3, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, vocab=101
)


@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_chunked_loss_equals_the_whole(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(20, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    labels = torch.randint(50, (20,), generator=generator)
    whole = F.cross_entropy(hidden @ weight.T, labels)
    expected = torch.autograd.grad(3.0 * whole, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk)
    torch.testing.assert_close(loss, whole)
    for ours, theirs in zip(torch.autograd.grad(3.0 * loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_memory_estimate_knows_how_long_chunks_are() -> None:
    """It has figures of its own: models and estimates import nothing of one another."""
    assert activation_memory.CHUNK_TOKENS == CHUNK_TOKENS
    assert activation_memory.AGREED_TOKENS == AGREED_TOKENS


def test_chunked_loss_refuses_a_second_backward_pass() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = chunked_cross_entropy(hidden, torch.randn(9, 8, requires_grad=True), torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.005), (torch.bfloat16, 0.02)])
def test_the_head_adds_up_in_the_format_asked_for(dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 16, generator=generator).bfloat16()
    weight = torch.randn(50, 16, generator=generator).bfloat16()
    labels = torch.randint(50, (256,), generator=generator)
    exact = weight.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ exact.T, labels), exact)
    head = weight.to(dtype).requires_grad_()
    for total in (1, 2):  # the second time it is there already
        chunked_cross_entropy(hidden, head, labels, 8, sums=dtype).backward()
        assert head.grad is not None
        assert head.grad.dtype == dtype
        assert (head.grad - total * expected).norm() / (total * expected).norm() < most


def test_a_token_sees_only_those_before_it() -> None:
    network = build_model(MODEL)
    network.init_weights(1)
    tokens = torch.arange(40)[None]
    later = tokens.clone()
    later[0, 25] = 99
    change = (network(tokens) - network(later)).abs().amax(-1)[0]
    assert change[:25].max() == 0
    assert change[25:].min() > 0


def test_initial_weights_follow_the_seed_and_the_loss_starts_at_chance() -> None:
    network = build_model(MODEL)
    network.init_weights(1)
    first = {name: weight.clone() for name, weight in network.state_dict().items()}
    network.init_weights(1)
    assert all(torch.equal(weight, first[name]) for name, weight in network.state_dict().items())
    tokens = torch.arange(90)[None]
    loss = network(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(torch.tensor(MODEL.vocab).log().item(), rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "'gpt2' is not built yet; those which are: llama"),
        ({"experts": Experts(count=4, top_k=2, ffn=8)}, "not experts"),
        ({"gated": False}, "not gated=false"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"head_dim": 7}, "must be even"),
        ({"rope": Rope(scaling="yarn")}, "choices are: none, llama3"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(MODEL, **change))
