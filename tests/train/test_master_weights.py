"""bf16 weights with the low bits of fp32 train as fp32 weights do."""

import copy
from typing import Any

import pytest
import torch
from nightly_cases import by_turns
from sharded_network import BF16, FP32, ONE, fp32_weights, shard
from small_config import CONFIG
from small_models import SMALL_MODELS
from training_ranks import Trained, outcome

from llmb.models.architectures import Network, build_model
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.bucket import BucketFormats
from llmb.train.parallel.fsdp import ShardedParameters
from llmb.train.precision import compute_in_bf16

ROUNDED = BF16._replace(has_low_bits=False)
LR = 1e-3


def network_of(name: str, formats: BucketFormats) -> tuple[Network, ShardedParameters]:
    """Return a network that computes in bf16; fp32 weights are cast as they are used."""
    network = build_model(SMALL_MODELS[name])
    network.init_weights(2)
    compute_in_bf16(network)
    return network, shard(network, formats)


def add_gradients(network: Network, micro_batches: int) -> list[float]:
    """Accumulate gradients; return the losses."""
    losses = []
    for micro in range(micro_batches):
        tokens = torch.randint(network.model.vocab, (2, 33), generator=torch.Generator().manual_seed(micro))
        loss = network(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


def set_gradients(sharded: ShardedParameters, network: Network, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    sharded.end_step()


@pytest.mark.parametrize("name", SMALL_MODELS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_losses_and_gradients_equal_fp32_weights(name: str, micro_batches: int) -> None:
    (plain, _), (split, _) = network_of(name, FP32), network_of(name, BF16)
    assert add_gradients(plain, micro_batches) == add_gradients(split, micro_batches)
    expected = {key: parameter.grad for key, parameter in plain.named_parameters()}
    for key, parameter in split.named_parameters():
        bound = 0.01 if key == "embedding.weight" else 1e-5  # torch sums the gradients of a token in bf16
        assert (parameter.grad - expected[key]).norm() <= bound * expected[key].norm(), key


def test_updates_equal_fp32_weights() -> None:
    networks = [network_of("llama", formats) for formats in (FP32, BF16)]
    optimizers = [Optimizer([sharded], ONE) for _, sharded in networks]
    for number in range(1, 6):
        for network, sharded in networks:
            set_gradients(sharded, network, number)
        norm, split_norm = (optimizer.update(LR * number) for optimizer in optimizers)
        assert norm == split_norm
    expected, actual = (fp32_weights(sharded) for _, sharded in networks)
    for name, weight in actual.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["grok1", "nemotron_h"])
@pytest.mark.parametrize("formats", [BF16, ROUNDED])
def test_matrices_are_bf16_and_the_rest_stays_fp32(name: str, formats: BucketFormats) -> None:
    network = build_model(SMALL_MODELS[name])
    network.init_weights(2)
    exact = copy.deepcopy(dict(network.named_parameters()))
    stored = fp32_weights(shard(network, formats))
    matrices = {name for name, parameter in network.named_parameters() if parameter.dtype == torch.bfloat16}
    assert "embedding.weight" in matrices
    assert matrices == {n for n, w in exact.items() if w.ndim > 1 and not ("router" in n or "conv_" in n)}
    for path, parameter in network.named_parameters():
        rounded = exact[path].bfloat16() if path in matrices else exact[path]
        assert torch.equal(parameter, rounded)
        assert torch.equal(stored[path], exact[path] if formats.has_low_bits else rounded.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_dtype(dtype: torch.dtype) -> None:
    network, sharded = network_of("llama", BF16._replace(gradients=dtype))
    add_gradients(network, 1)
    assert {parameter.grad.dtype for parameter in network.parameters() if parameter.ndim == 2} == {dtype}
    assert {parameter.grad.dtype for parameter in network.parameters() if parameter.ndim == 1} == {torch.float32}
    sharded.end_step()
    assert {bucket.grad_shard.dtype for bucket in sharded.buckets if bucket.grad_shard is not None} == {dtype}


def state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return copies of weights, low bits and AdamW state."""
    tensors = [tensor for *_, tensor in (*optimizer.bucket_state(), *optimizer.replicated_state())]
    for bucket in optimizer.buckets:
        tensors += [bucket.shard] if bucket.low is None else [bucket.shard, bucket.low]
    return [tensor.clone() for tensor in (*tensors, *optimizer.replicated.values())]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("formats", [FP32, BF16, ROUNDED])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_non_finite_or_discarded_update_changes_nothing(moments: torch.dtype, formats: BucketFormats) -> None:
    network, sharded = network_of("llama", formats)
    optimizer = Optimizer([sharded], ONE, moments=moments)
    set_gradients(sharded, network, 0)
    optimizer.update(LR)
    before = state_of(optimizer)
    for spoilt in ("embedding.weight", "norm.weight"):
        network.get_parameter(spoilt).grad = torch.full(network.get_parameter(spoilt).shape, torch.inf)
        sharded.end_step()
        assert optimizer.update(LR).item() == torch.inf
        assert_equal(state_of(optimizer), before)
    set_gradients(sharded, network, 1)
    assert optimizer.update(LR, discard=torch.tensor(True)).isfinite()
    assert_equal(state_of(optimizer), before)


def test_repeated_update_replaces_the_discarded_one() -> None:
    states = []
    for discarded in (0, 2):
        network, sharded = network_of("llama", ROUNDED)
        optimizer = Optimizer([sharded], ONE)
        for number in (1, 2):
            for _ in range(discarded):
                set_gradients(sharded, network, 9)
                optimizer.update(LR, discard=torch.tensor(True))
                optimizer.repeat()
            set_gradients(sharded, network, number)
            optimizer.update(LR, discard=torch.tensor(False))
        states.append(state_of(optimizer))
    assert_equal(*states)


# Runs: one process and two ranks.


def bf16_outcome(**changes: Any) -> Trained:
    return outcome(CONFIG.model, **{"dtype": "bf16", "mbs": 2, "lr": 3e-3, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "layout"),
    [
        ("moments", {}),
        pytest.param("moments", {"dp": 2, "fsdp": True}, marks=pytest.mark.nightly),
        pytest.param("master_weights", {}, marks=pytest.mark.nightly),
        ("master_weights", {"dp": 2, "fsdp": True}),
    ],
    ids=str,
)
def test_bf16_state_learns_as_fp32(state: str, layout: dict[str, Any]) -> None:
    fp32, bf16 = (bf16_outcome(steps=40, **{state: dtype}, **layout).losses for dtype in ("fp32", "bf16"))
    assert fp32 != bf16
    assert bf16[-1] == pytest.approx(fp32[-1], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "fsdp"), by_turns(("gradients", "reduce_dtype"), (False, True)))
def test_bf16_gradients_of_two_ranks(setting: str, fsdp: bool) -> None:
    """Rounding a gradient changes its norm by less than 2**-8; the weights move by lr a step, whatever the size."""
    fp32, bf16 = (bf16_outcome(steps=2, dp=2, fsdp=fsdp, gbs=8, **{setting: dtype}) for dtype in ("fp32", "bf16"))
    losses, norms, weights = bf16.distances(fp32)
    assert 0 < norms < 2**-8
    assert losses < 1e-3
    assert weights < 1e-2
