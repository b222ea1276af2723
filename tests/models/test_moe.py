"""MoE: forced load balance, auxiliary loss, saved activations; numbers: test_hf_parity.py and test_grok1.py."""

from dataclasses import replace

import pytest
import torch
from small_models import grok1_model

from llmb.config.model import MoEConfig
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.models.architectures import build_model
from llmb.models.moe import MoE
from llmb.perfmodel.activation_memory import ActivationSizes
from llmb.train.module_class import use_class
from llmb.train.precision import FusedGatedMlp

EXPERTS = MoEConfig(count=6, top_k=2, ffn=24)
MODEL = grok1_model(ffn=24, vocab=101, activation="silu", tied_embeddings=False, post_norms=False, experts=EXPERTS)


def random_moe(experts: MoEConfig) -> MoE:
    block = MoE(replace(MODEL, experts=experts))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return block


def network_of(experts: MoEConfig) -> torch.nn.Module:
    network = build_model(replace(MODEL, experts=experts))
    network.init_weights(1)
    return network


def inputs(tokens: int = 40) -> torch.Tensor:
    return torch.randn(2, tokens // 2, 32, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("count", "top_k", "tokens"), [(6, 2, 40), (8, 3, 50), (256, 8, 40), (5, 5, 4)])
def test_forced_load_balance_is_even_and_trains_the_router(count: int, top_k: int, tokens: int) -> None:
    block = random_moe(replace(EXPERTS, count=count, top_k=top_k, renormalise=False))
    block.router.force_load_balance = True
    x = inputs(tokens)
    weights, chosen = block.router(x.flatten(0, 1))
    loads = chosen.flatten().bincount(minlength=count)
    assert loads.max() - loads.min() <= 1
    assert all(len(set(row.tolist())) == top_k for row in chosen)
    torch.testing.assert_close(weights, (x.flatten(0, 1) @ block.router.weight.T).softmax(-1).gather(1, chosen))
    block(x).square().sum().backward()
    assert block.router.weight.grad.abs().amax(1).min() > 0


def test_aux_loss_is_one_at_even_load_and_part_of_the_loss() -> None:
    network, plain = network_of(replace(EXPERTS, aux_loss=0.5)), network_of(EXPERTS)
    tokens = torch.arange(100)[None]
    total, loss = (n(tokens[:, :-1], tokens[:, 1:]) for n in (network, plain))
    aux_loss = (total - loss).item()
    assert aux_loss == pytest.approx(2 * 0.5, rel=0.1)  # two layers; initial routers are nearly even
    total.backward()
    loss.backward()
    routers = [(n.layers[0].mlp.router.weight.grad, n.layers[1].mlp.router.weight.grad) for n in (network, plain)]
    for out, expected_out in zip(*routers, strict=True):
        assert (out - expected_out).abs().max() > 0
    assert torch.equal(network(tokens), plain(tokens))  # logits do not change


def test_aux_loss_by_definition() -> None:
    router = random_moe(replace(EXPERTS, aux_loss=0.25)).router
    losses: list[torch.Tensor] = []
    router.aux_losses = losses
    x = inputs().flatten(0, 1)
    _, chosen = router(x)
    probabilities = (x @ router.weight.T).softmax(-1)
    fractions = chosen.flatten().bincount(minlength=6) / 80
    by_hand = 0.25 * 6 * sum(fractions[e] * probabilities[:, e].mean() for e in range(6))
    torch.testing.assert_close(losses[0], by_hand)


@pytest.mark.parametrize(
    "change", [{"renormalise": False}, {"shared": 1, "top_k": 4, "score": "sigmoid", "scale": 2.5}], ids=str
)
def test_saved_activations_match_the_memory_estimate(change: dict) -> None:
    model = replace(MODEL, experts=replace(EXPERTS, **change))
    block, x = random_moe(model.experts), inputs().bfloat16().requires_grad_()
    if block.shared is not None:
        use_class(block.shared, FusedGatedMlp)
    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameter_storages:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    config = RunConfig(
        name="one layer", target="pretrain", size="small", machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
        model=model, parallel=Parallel(), precision=Precision(dtype="bf16"),
        workload=Training(seqlen=20, mbs=2, gbs=2, ga=1),
    )  # fmt: skip
    sizes = ActivationSizes(config)
    ends = 4 * model.experts.count  # ends_E: independent of the number of tokens, and left out of the estimate
    assert sum(storage.nbytes() for storage in saved.values()) == sizes.block("experts") - sizes.residual + ends


def test_equal_inputs_give_equal_bits() -> None:
    block = random_moe(replace(EXPERTS, top_k=4))
    x = inputs().requires_grad_()
    results = [(y := block(x), *torch.autograd.grad(y.square().sum(), (x, *block.parameters()))) for _ in range(3)]
    assert all(
        torch.equal(first, second) for second in results[1:] for first, second in zip(results[0], second, strict=True)
    )
