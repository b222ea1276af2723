"""Weights in two halves train as the fp32 weights do whose halves they are."""

import copy

import pytest
import torch
from small_models import SMALL_MODELS

from llmb.models.architectures import Network, build_model
from llmb.ops.embedding.embedding_autograd import embedded
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh
from llmb.train.precision import compute_in_bf16
from llmb.train.split_weights import HalvedWeight, halve_weights

ONE = Mesh(0, 1, torch.device("cpu"))
LR = 1e-3


def network_of(name: str) -> Network:
    network = build_model(SMALL_MODELS[name])
    network.init_weights(2)
    compute_in_bf16(network)
    return network


def add_gradients(network: Network, micro_batches: int) -> list[float]:
    """The losses."""
    losses = []
    for micro in range(micro_batches):
        tokens = torch.randint(network.model.vocab, (2, 33), generator=torch.Generator().manual_seed(micro))
        loss = network(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


def both_of(name: str) -> tuple[Network, Network]:
    """With whole weights, and with the same in halves."""
    plain = network_of(name)
    halved = copy.deepcopy(plain)
    halve_weights(halved, torch.float32, exact=True)
    return plain, halved


def whole(network: Network) -> dict[str, torch.Tensor]:
    return {
        name: one.whole() if isinstance(one, HalvedWeight) else one.detach() for name, one in network.named_parameters()
    }


@pytest.mark.parametrize("name", SMALL_MODELS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_losses_and_gradients_are_those_of_the_whole_weights(name: str, micro_batches: int) -> None:
    plain, halved = both_of(name)
    assert add_gradients(plain, micro_batches) == add_gradients(halved, micro_batches)
    expected = {one: parameter.grad for one, parameter in plain.named_parameters()}
    for one, parameter in halved.named_parameters():
        bound = 0.01 if one == "embedding.weight" else 1e-5  # torch's own adds a word's slopes in bf16
        assert (parameter.grad - expected[one]).norm() <= bound * expected[one].norm(), one


def test_updates_are_those_of_the_whole_weights() -> None:
    plain, halved = both_of("llama")
    optimizers = [Optimizer(one.named_parameters(), ONE, LR, set()) for one in (plain, halved)]
    for number in range(1, 6):
        seed = torch.Generator().manual_seed(number)
        for pair in zip(plain.parameters(), halved.parameters(), strict=True):
            gradient = torch.randn(pair[0].shape, generator=seed)
            for parameter in pair:
                parameter.grad = gradient.clone()
        norm, halved_norm = (optimizer.update(LR * number) for optimizer in optimizers)
        assert norm == halved_norm
    expected = whole(plain)
    for name, found in whole(halved).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-8)


def test_products_take_the_upper_half_and_everything_else_stays_whole() -> None:
    network = network_of("grok1")
    exact = {name: one.detach().clone() for name, one in network.named_parameters()}
    halve_weights(network, torch.float32, exact=True)
    halved = {name for name, one in network.named_parameters() if isinstance(one, HalvedWeight)}
    assert {"embedding.weight", "layers.0.attention.q.weight", "layers.0.mlp.gate.weight"} <= halved
    assert not {name for name in halved if "router" in name or "norm" in name}
    for name, one in network.named_parameters():
        if name in halved:
            assert torch.equal(one.detach(), exact[name].bfloat16())
            assert torch.equal(one.whole(), exact[name])
        else:
            assert torch.equal(one.detach(), exact[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_kept_in_the_format_asked_for(dtype: torch.dtype) -> None:
    network = network_of("llama")
    halve_weights(network, dtype, exact=True)
    tokens = torch.arange(33)[None]
    network(tokens[:, :-1], tokens[:, 1:]).backward()
    assert {one.grad.dtype for one in network.parameters() if isinstance(one, HalvedWeight)} == {dtype}
    assert {one.grad.dtype for one in network.parameters() if one.ndim == 1} == {torch.float32}


def test_without_lower_halves_weights_are_the_nearest_numbers() -> None:
    network = network_of("llama")
    exact = {name: one.detach().clone() for name, one in network.named_parameters()}
    halve_weights(network, torch.float32, exact=False)
    for name, one in network.named_parameters():
        if isinstance(one, HalvedWeight):
            assert one.low is None
            assert torch.equal(one.whole(), exact[name].bfloat16().float())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_step_of_nonsense_changes_nothing(moments: torch.dtype, exact: bool) -> None:
    network = network_of("llama")
    halve_weights(network, torch.float32, exact)
    optimizer = Optimizer(network.named_parameters(), ONE, LR, set(), moments)
    before = whole(network)
    for number, parameter in enumerate(network.parameters()):
        parameter.grad = torch.full_like(parameter, torch.inf if number == 3 else 1.0, dtype=torch.float32)
    assert optimizer.update(LR).item() == torch.inf
    assert all(torch.equal(found, before[name]) for name, found in whole(network).items())


@pytest.mark.parametrize("what", ["moments", "masters"])
def test_what_is_kept_in_bf16_learns_as_in_fp32(trained, what: str) -> None:
    settings = {"dtype": "bf16", "steps": 40, "lr": 3e-3, "gbs": 4, "mbs": 4}
    wide, narrow = (trained(**{what: dtype}, **settings).losses() for dtype in ("fp32", "bf16"))
    assert wide != narrow
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.01)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("what", ["moments", "masters"])
def test_a_resumed_run_in_bf16_is_the_same_to_the_bit(trained, what: str) -> None:
    settings = {"dtype": "bf16", what: "bf16"}
    straight, first = trained(steps=6, **settings), trained(steps=3, checkpoint_every=3, **settings)
    rest = trained(steps=6, resume=str(first.folder), **settings)
    assert first.losses() + rest.losses() == straight.losses()


@pytest.mark.parametrize("what", ["moments", "masters"])
def test_what_is_kept_in_bf16_needs_halved_weights(trained, what: str) -> None:
    refused = trained(dtype="fp32", steps=1, **{what: "bf16"})
    assert f"{what}=bf16 with dtype=fp32 on 1 ranks" in refused.ended().reason


def test_an_embedding_adds_to_the_gradient_that_is_there() -> None:
    weight = torch.nn.Parameter(torch.randn(11, 6).bfloat16())
    weight.grad_dtype = torch.float32
    tokens, slope = torch.tensor([[1, 3, 3], [3, 10, 1]]), torch.randn(2, 3, 6)
    expected = torch.zeros(11, 6).index_add_(0, tokens.flatten(), slope.bfloat16().float().flatten(0, 1))
    places = set()
    for times in (1, 2, 3):
        x_BTC = embedded(tokens, weight)
        assert torch.equal(x_BTC, weight.detach()[tokens])
        x_BTC.backward(slope.bfloat16())
        places.add(weight.grad.data_ptr())
        torch.testing.assert_close(weight.grad, times * expected)
    assert len(places) == 1
