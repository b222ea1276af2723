"""LoRA out of core: the losses, gradients and adapters of autograd, whatever the plan, and frozen weights that stay."""

from dataclasses import replace

import pytest
import torch
from lora_reference import (
    LORA,
    frozen_bits,
    lora_plan,
    lora_trainer,
    quantized,
    random_adapters,
    train_reference_adapters,
)
from reference_training import LEAST, SMOOTH, TIED, UNTIED, least_plan, network_of, trained
from shuffled_streams import ShuffledStreams

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.runtime import adamw_settings

STEPS = 3
FP8 = replace(LORA, frozen_weights="fp8")
SOME = replace(LORA, targets=("k_proj", "up_proj"))
RESIDENT = replace(
    LEAST, resident_params=7, param_blocks=0, gbs=5, groups_per_round=2, inp_slots=8, kv_slots=6, attn_slots=6,
    rest_slots=6, levels="FFFFFF",
)  # fmt: skip
PLANS = {
    "everything saved": LEAST,
    "chunks at all levels": replace(LEAST, chunk_tokens=4, levels="FAIAIFIFA"),
    "rounds, the last one short": replace(LEAST, gbs=5, groups_per_round=2, levels="FAIIAF"),
    "sequences share a chunk": replace(
        LEAST, gbs=7, seqs_per_group=3, chunk_tokens=30, groups_per_round=2, levels="IFAFAI"
    ),
    "everything resident": RESIDENT,
}  # fmt: skip
QWEN3 = replace(UNTIED, name="norms-and-biases", architecture="qwen3", qk_norm="head", qkv_bias=True)
POST_NORMS = replace(UNTIED, name="post-norms", architecture="gemma3", qk_norm="head", post_norms=True)


@pytest.fixture(autouse=True)
def smooth_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam would move a weight as far for a gradient that is rounding only as for a large one."""
    monkeypatch.setattr(adamw_settings, "EPS", SMOOTH)


def assert_trains_as_autograd(model: Model, plan: Plan, clip: float | None = None) -> None:
    trainer = lora_trainer(model, plan, clip, ShuffledStreams(5))
    assert trainer.adapters is not None
    initial, before = random_adapters(trainer.adapters.adapters), frozen_bits(trainer)
    network = quantized(network_of(model)) if plan.widens_weights else None
    losses, norms, gradients, adapters = train_reference_adapters(model, plan, initial, STEPS, clip, network)
    first = lora_trainer(model, plan, clip)
    random_adapters(first.adapters.adapters)
    trained(first, 1)
    for name, gradient in gradients.items():
        actual, largest = first.adapters.adapters.named_grads[name], gradient.abs().max().item()
        torch.testing.assert_close(actual, gradient, rtol=0, atol=1e-5 * largest, msg=lambda m, n=name: n + m)
    actual_losses, actual_norms = trained(trainer, STEPS)
    assert actual_losses == pytest.approx(losses, rel=2e-6)
    assert actual_norms == pytest.approx(norms, rel=1e-5)
    for name, value in adapters.items():
        actual = trainer.adapters.adapters.named[name]
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: n + m)
    assert all(map(torch.equal, frozen_bits(trainer), before))


@pytest.mark.parametrize("plan", PLANS)
def test_every_path_matches_autograd(plan: str) -> None:
    assert_trains_as_autograd(UNTIED, lora_plan(PLANS[plan]))


@pytest.mark.parametrize("model", [TIED, QWEN3, POST_NORMS], ids=lambda model: model.name)
def test_other_models_match_autograd(model: Model) -> None:
    assert_trains_as_autograd(model, lora_plan(least_plan(model)), clip=0.5)


def test_some_projections_match_autograd() -> None:
    assert_trains_as_autograd(UNTIED, lora_plan(PLANS["chunks at all levels"], SOME))


@pytest.mark.parametrize(
    ("model", "plan"),
    [(UNTIED, "chunks at all levels"), (UNTIED, "everything resident"), (TIED, "rounds, the last one short")],
    ids=lambda value: getattr(value, "name", value),
)
def test_fp8_weights_match_autograd_on_widened_ones(model: Model, plan: str) -> None:
    assert_trains_as_autograd(model, lora_plan(PLANS[plan], FP8))
