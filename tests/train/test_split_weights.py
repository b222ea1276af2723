"""Split master weights train as fp32 weights do."""

import copy

import pytest
import torch
from small_models import SMALL_MODELS

from llmb.models.architectures import Network, build_model
from llmb.ops.embedding.embedding_autograd import fused_embedding
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh
from llmb.train.precision import compute_in_bf16
from llmb.train.split_weights import SplitWeight, split_master_weights

ONE = Mesh(0, 1, torch.device("cpu"))
LR = 1e-3


def network_of(name: str) -> Network:
    network = build_model(SMALL_MODELS[name])
    network.init_weights(2)
    compute_in_bf16(network)
    return network


def add_gradients(network: Network, micro_batches: int) -> list[float]:
    """Accumulate gradients; return the losses."""
    losses = []
    for micro in range(micro_batches):
        tokens = torch.randint(network.model.vocab, (2, 33), generator=torch.Generator().manual_seed(micro))
        loss = network(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


def plain_and_split(name: str) -> tuple[Network, Network]:
    """Return a network with fp32 weights, and a copy with split weights."""
    plain = network_of(name)
    split = copy.deepcopy(plain)
    split_master_weights(split, torch.float32, exact=True)
    return plain, split


def fp32_weights(network: Network) -> dict[str, torch.Tensor]:
    return {
        name: parameter.fp32() if isinstance(parameter, SplitWeight) else parameter.detach()
        for name, parameter in network.named_parameters()
    }


@pytest.mark.parametrize("name", SMALL_MODELS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_losses_and_gradients_equal_fp32_weights(name: str, micro_batches: int) -> None:
    plain, split = plain_and_split(name)
    assert add_gradients(plain, micro_batches) == add_gradients(split, micro_batches)
    expected = {key: parameter.grad for key, parameter in plain.named_parameters()}
    for key, parameter in split.named_parameters():
        bound = 0.01 if key == "embedding.weight" else 1e-5  # torch sums the gradients of a token in bf16
        assert (parameter.grad - expected[key]).norm() <= bound * expected[key].norm(), key


def test_updates_equal_fp32_weights() -> None:
    plain, split = plain_and_split("llama")
    optimizers = [Optimizer(network.named_parameters(), ONE, LR, set()) for network in (plain, split)]
    for number in range(1, 6):
        seed = torch.Generator().manual_seed(number)
        for pair in zip(plain.parameters(), split.parameters(), strict=True):
            gradient = torch.randn(pair[0].shape, generator=seed)
            for parameter in pair:
                parameter.grad = gradient.clone()
        norm, split_norm = (optimizer.update(LR * number) for optimizer in optimizers)
        assert norm == split_norm
    expected = fp32_weights(plain)
    for name, weight in fp32_weights(split).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-8)


def test_matrices_are_split_and_the_rest_stays_fp32() -> None:
    network = network_of("grok1")
    exact = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    split_master_weights(network, torch.float32, exact=True)
    split = {name for name, parameter in network.named_parameters() if isinstance(parameter, SplitWeight)}
    assert {"embedding.weight", "layers.0.attention.q.weight", "layers.0.mlp.gate.weight"} <= split
    assert not {name for name in split if "router" in name or "norm" in name}
    for name, parameter in network.named_parameters():
        if name in split:
            assert torch.equal(parameter.detach(), exact[name].bfloat16())
            assert torch.equal(parameter.fp32(), exact[name])
        else:
            assert torch.equal(parameter.detach(), exact[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_dtype(dtype: torch.dtype) -> None:
    network = network_of("llama")
    split_master_weights(network, dtype, exact=True)
    tokens = torch.arange(33)[None]
    network(tokens[:, :-1], tokens[:, 1:]).backward()
    assert {parameter.grad.dtype for parameter in network.parameters() if isinstance(parameter, SplitWeight)} == {dtype}
    assert {parameter.grad.dtype for parameter in network.parameters() if parameter.ndim == 1} == {torch.float32}


def test_without_low_bits_weights_are_rounded_to_bf16() -> None:
    network = network_of("llama")
    exact = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    split_master_weights(network, torch.float32, exact=False)
    for name, parameter in network.named_parameters():
        if isinstance(parameter, SplitWeight):
            assert parameter.low is None
            assert torch.equal(parameter.fp32(), exact[name].bfloat16().float())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_non_finite_split_update_changes_nothing(moments: torch.dtype, exact: bool) -> None:
    network = network_of("llama")
    split_master_weights(network, torch.float32, exact)
    optimizer = Optimizer(network.named_parameters(), ONE, LR, set(), moments)
    before = fp32_weights(network)
    for number, parameter in enumerate(network.parameters()):
        parameter.grad = torch.full_like(parameter, torch.inf if number == 3 else 1.0, dtype=torch.float32)
    assert optimizer.update(LR).item() == torch.inf
    assert all(torch.equal(weight, before[name]) for name, weight in fp32_weights(network).items())


@pytest.mark.slow
@pytest.mark.parametrize("state", ["moments", "master_weights"])
def test_bf16_state_learns_as_fp32(trained, state: str) -> None:
    settings = {"dtype": "bf16", "steps": 40, "lr": 3e-3, "gbs": 4, "mbs": 4}
    fp32, bf16 = (trained(**{state: dtype}, **settings).losses() for dtype in ("fp32", "bf16"))
    assert fp32 != bf16
    assert bf16[-1] == pytest.approx(fp32[-1], rel=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("state", ["moments", "master_weights"])
def test_resume_of_bf16_state_is_bit_exact(trained, state: str) -> None:
    settings = {"dtype": "bf16", state: "bf16"}
    straight, first = trained(steps=6, **settings), trained(steps=3, checkpoint_every=3, **settings)
    resumed = trained(steps=6, resume=str(first.folder), **settings)
    assert first.losses() + resumed.losses() == straight.losses()


@pytest.mark.parametrize("state", ["moments", "master_weights"])
def test_bf16_state_needs_split_weights(trained, state: str) -> None:
    refused = trained(dtype="fp32", steps=1, **{state: "bf16"})
    assert f"{state}=bf16 with dtype=fp32 on 1 ranks" in refused.ended().reason


def test_embedding_accumulates_gradient_in_place() -> None:
    weight = torch.nn.Parameter(torch.randn(11, 6).bfloat16())
    weight.grad_dtype = torch.float32
    tokens, d_x = torch.tensor([[1, 3, 3], [3, 10, 1]]), torch.randn(2, 3, 6)
    expected = torch.zeros(11, 6).index_add_(0, tokens.flatten(), d_x.bfloat16().float().flatten(0, 1))
    addresses = set()
    for times in (1, 2, 3):
        x_BTC = fused_embedding(tokens, weight)
        assert torch.equal(x_BTC, weight.detach()[tokens])
        x_BTC.backward(d_x.bfloat16())
        addresses.add(weight.grad.data_ptr())
        torch.testing.assert_close(weight.grad, times * expected)
    assert len(addresses) == 1
