"""bf16: the compute is rounded, the weights, their gradients and their updates are not."""

import copy

import pytest
import torch

from llmb.models.architectures import build_model
from llmb.spec import Model
from llmb.train.optimizer import make_optimizer, update
from llmb.train.precision import CastLinear, compute_in_bf16

MODEL = Model(
    name="small", architecture="llama", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=128
)


@pytest.fixture
def both() -> tuple:
    """The same weights in a network that computes in fp32 and one that computes in bf16, after one backward pass."""
    exact = build_model(MODEL)
    exact.init_weights(torch.Generator().manual_seed(2))
    rounded = copy.deepcopy(exact)
    compute_in_bf16(rounded)
    tokens = torch.randint(MODEL.vocab, (2, 65), generator=torch.Generator().manual_seed(3))
    for network in (exact, rounded):
        network(tokens[:, :-1], tokens[:, 1:]).backward()
    return exact, rounded


def test_every_product_is_in_bf16_and_every_gradient_in_fp32(both) -> None:
    exact, rounded = both
    assert all(type(layer) is CastLinear for name, layer in rounded.named_modules() if name.endswith((".q", ".down")))
    assert rounded(torch.arange(5)[None]).dtype == torch.bfloat16
    expected = dict(exact.named_parameters())
    assert expected.keys() == dict(rounded.named_parameters()).keys()
    for name, parameter in rounded.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert 0 < error < 0.03, f"{name}: {error:.3f}"


def test_an_update_too_small_for_bf16_is_not_lost(both) -> None:
    _, rounded = both
    before = rounded.layers[0].mlp.up.weight.detach().clone()
    update(make_optimizer(rounded.parameters(), lr=1e-7), lr=1e-7)
    after = rounded.layers[0].mlp.up.weight.detach()
    change = (after - before).abs()
    assert (change > 0).double().mean() > 0.99
    assert change.max() < 1.2e-7
    assert (after.bfloat16() == before.bfloat16()).double().mean() > 0.99  # bf16 weights would have stood still


def test_gradients_are_clipped_and_the_norm_is_the_one_before(both) -> None:
    _, rounded = both
    for parameter in rounded.parameters():
        parameter.grad.mul_(1000)
    expected = torch.cat([p.grad.flatten().double() for p in rounded.parameters()]).norm()
    grads = [p.grad for p in rounded.parameters()]
    norm = update(make_optimizer(rounded.parameters(), lr=0.1), lr=0.1)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.cat([g.flatten() for g in grads]).norm().item() == pytest.approx(1.0, rel=1e-3)
    assert all(p.grad is None for p in rounded.parameters())
