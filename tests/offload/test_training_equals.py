"""The proof: out-of-core training has the losses, gradient norms and weights of ordinary training, whatever the plan.

Small models and absurdly small budgets force every path: of layers with explicit backward, and of those that autograd
computes, with biases, norms, windows, sinks or experts. All memory begins as NaN, and each plan is followed twice: in
the order in which it is issued, and in odd orders that keep only what the program declares.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_table import TABLE_MODELS
from nightly_cases import by_turns
from outofcore_plans import models, plans
from reference_training import (
    LEAST,
    SEED,
    SMOOTH,
    TIED,
    UNTIED,
    assert_trains_as_reference,
    has_plain_layers,
    least_plan,
    train_reference,
    trained,
    trainer_of,
    weights_in,
)  # fmt: skip
from shuffled_streams import ShuffledStreams
from small_models import grok1_model

from llmb.config.model import Model, MoEConfig, RopeConfig
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.native.outofcore_support import check_outofcore_model
from llmb.config.offload_plan import UPDATES, Plan
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.llama import Llama
from llmb.perfmodel.offload.layer_params import layer_param_shapes
from llmb.runtime.adamw_settings import EPS

STEPS = 3


def is_computed(model: Model) -> bool:
    """Return what the table of docs/models.md says."""
    try:
        check_outofcore_model(model, "bf16")
    except ConfigError:
        return False
    return True


GROK_1 = grok1_model(
    name="no-aux-loss", logit_scale=0.6, embedding_scale=5.0, rope=RopeConfig(theta=10_000.0),
    experts=MoEConfig(count=8, top_k=2, ffn=40, renormalise=False, aux_loss=0.0),
)  # fmt: skip
COMPUTED = [*(model for model in TABLE_MODELS if is_computed(model) and not has_plain_layers(model)), GROK_1]
BY_AUTOGRAD = [model for model in COMPUTED if not has_llama_layers(model)]
# Least buffers unless it says otherwise: five layers' worth of everything moves through one or two.
PLANS = {
    "everything kept": LEAST,
    "attention kept": replace(LEAST, levels="AAA"),
    "input kept": replace(LEAST, levels="III"),
    "levels mixed over layers and chunks": replace(LEAST, chunk_tokens=4, levels="FAIAIFIFA"),
    "chunks with a short last one": replace(LEAST, chunk_tokens=3, levels="F" * 12),
    "chunks of one token": replace(LEAST, chunk_tokens=1, seqlen=4, levels="FAI" * 4),
    "several groups of several chunks": replace(LEAST, gbs=3, chunk_tokens=4, groups_per_round=3, levels="FAI" * 9),
    "rounds, the last one short": replace(LEAST, gbs=5, groups_per_round=2, levels="FAIIAF"),
    "sequences share a chunk, the last group is short": replace(
        LEAST, gbs=7, seqs_per_group=3, chunk_tokens=30, groups_per_round=2, levels="IFAFAI"
    ),
    "updates wait for the next forward pass": replace(LEAST, update_at="forward"),
    "the same over rounds": replace(LEAST, update_at="forward", gbs=3, chunk_tokens=6, levels="FAIFAI"),
    "everything resident": replace(
        LEAST, resident_params=7, resident_grads=7, resident_states=7, param_blocks=0, grad_blocks=0, state_blocks=0,
        gbs=3, groups_per_round=2, inp_slots=8, kv_slots=6, attn_slots=6, rest_slots=6, levels="FFFFFF",
    ),
    "some resident": replace(
        LEAST, resident_params=2, resident_grads=1, resident_states=4, update_at="forward", gbs=4, groups_per_round=2,
        inp_slots=3, kv_slots=2, attn_slots=2, rest_slots=2, levels="FFAFIF",
    ),
    "more buffers than are needed": replace(
        LEAST, param_blocks=9, grad_blocks=5, state_blocks=3, inp_slots=20, kv_slots=9, attn_slots=9, rest_slots=9,
        chunk_tokens=4, levels="F" * 9,
    ),
}  # fmt: skip
STREAMS = {"in order": lambda: None, "shuffled": lambda: ShuffledStreams(3)}


@pytest.fixture(autouse=True)
def smooth_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam moves a weight as far for the smallest gradient, which is rounding only, as for a large one.

    With a larger epsilon on both sides it does not, and weights can be compared as closely as gradients.
    """
    monkeypatch.setattr("llmb.offload.task_compute.EPS", SMOOTH)


@pytest.mark.parametrize(("plan", "streams"), by_turns(PLANS, STREAMS))
def test_every_path_matches_ordinary_training(plan: str, streams: str) -> None:
    assert_trains_as_reference(UNTIED, PLANS[plan], STEPS, None, STREAMS[streams]())


WINDOWS = replace(UNTIED, name="windows", attention_pattern="SFN", window=3, attention_scale=0.5)
QWEN3 = replace(UNTIED, name="norms of heads", architecture="qwen3", qk_norm="head")
QWEN3_BIAS = replace(QWEN3, name="norms-and-biases", qkv_bias=True)
WITH_VECTORS = (
    replace(UNTIED, name="biases", architecture="qwen2", qkv_bias=True),
    QWEN3,
    replace(QWEN3_BIAS, name="both, with windows and without RoPE", attention_pattern="SFN", window=3),
)
# So narrow that gradients do not fit into the memory of gate and up; as many KV heads as heads; scaled RoPE.
NARROW = replace(UNTIED, name="narrow", ffn=16)
FULL_HEADS = replace(UNTIED, name="full heads", kv_heads=4)
SCALED_ROPE = replace(UNTIED, name="scaled RoPE", rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=16))
SCALED = replace(TIED, name="scaled ends", embedding_scale=5.0, logit_scale=0.5, logit_softcap=3.0)
VOCABULARY = replace(UNTIED, name="many vocabulary shards", vocab=1000)
POST_NORMS = replace(UNTIED, name="post-norms", architecture="gemma3", qk_norm="head", post_norms=True)
GEMMA_2 = replace(
    UNTIED, name="gemma2", post_norms=True, activation="gelu", attn_logit_softcap=5.0, attention_pattern="SF", window=3
)
AUTOGRAD = replace(UNTIED, name="no pre-norms", architecture="olmo2", pre_norms=False, post_norms=True)
CASES: list[tuple[Model, Plan | str, float | None]] = [
    *((TIED, replace(PLANS["the same over rounds"], update_at=at), None) for at in ("forward", "backward")),
    *((UNTIED, replace(LEAST, update_at="forward", gbs=3), clip) for clip in (0.5, 100.0)),
    *(
        (WINDOWS, plan, None)
        for plan in ("levels mixed over layers and chunks", "chunks with a short last one", "input kept")
    ),
    *(
        (model, plan, None)
        for model in WITH_VECTORS
        for plan in ("levels mixed over layers and chunks", "rounds, the last one short", "everything resident")
    ),
    *((model, least_plan(model), None) for model in (SCALED, NARROW, FULL_HEADS, SCALED_ROPE)),
    (VOCABULARY, least_plan(VOCABULARY), None),
    *((GEMMA_2, plan, None) for plan in ("levels mixed over layers and chunks", "everything resident")),
    (POST_NORMS, replace(least_plan(POST_NORMS), update_at="forward"), 0.5),
    (
        AUTOGRAD,
        replace(least_plan(AUTOGRAD), seqs_per_group=3, chunk_tokens=30, gbs=7, levels="IAIAAI"),
        None,
    ),
    (
        AUTOGRAD,
        replace(
            least_plan(AUTOGRAD), resident_params=7, resident_grads=7, resident_states=7, param_blocks=0,
            grad_blocks=0, state_blocks=0, inp_slots=24, kv_slots=6, attn_slots=18, levels="A" * 18,
        ),
        None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "clip"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_other_models_match_ordinary_training(model: Model, plan: Plan | str, clip: float | None) -> None:
    plan = PLANS[plan] if isinstance(plan, str) else plan
    assert_trains_as_reference(model, plan, STEPS, clip, ShuffledStreams(5))


@pytest.mark.parametrize("model", COMPUTED, ids=lambda model: f"{model.architecture}-{model.name}")
def test_every_variant_matches_ordinary_training(model: Model) -> None:
    assert_trains_as_reference(model, least_plan(model), 2, streams=ShuffledStreams(5))


def test_every_architecture_that_is_not_refused_is_compared() -> None:
    architectures = {model.architecture for model in BY_AUTOGRAD}
    with_biases = {"llama", "qwen3", "smollm3", "gemma2", "gemma3", "seed_oss"}  # of the output projection
    others = {"olmo2", "olmo3", "exaone4", "granite", "olmoe", "mixtral", "qwen3_moe", "gpt_oss", "grok1"}
    assert architectures == with_biases | others


@pytest.mark.parametrize("model", BY_AUTOGRAD, ids=lambda model: f"{model.architecture}-{model.name}")
def test_named_parameters_are_those_of_the_network(model: Model) -> None:
    with torch.device("meta"):
        layer = build_model(model).layers[-1]
    assert layer_param_shapes(model) == {
        name: tuple(dict(layer.named_parameters())[name].shape) for name in layer_param_shapes(model)
    }
    assert len(layer_param_shapes(model)) == len(list(layer.parameters()))
    ranks = [len(shape) > 1 for shape in layer_param_shapes(model).values()]
    assert ranks == sorted(ranks, reverse=True)  # those with weight decay first


@pytest.mark.parametrize(
    ("precision", "model"),
    by_turns((("bf16", None), ("fp8", None), ("fp8", "rowwise")), (QWEN3_BIAS, GEMMA_2)),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_recomputation_with_biases_and_norms_gives_the_same_bits(
    precision: tuple[str, str | None], model: Model
) -> None:
    dtype, recipe = precision
    """Whatever is saved of a chunk, what norms take and give has the same values."""
    plans = [replace(LEAST, dtype=dtype, fp8_recipe=recipe, chunk_tokens=4, levels=9 * level) for level in "FAI"]
    trainers = [trainer_of(model, plan) for plan in plans]
    losses = [trained(trainer, 2) for trainer in trainers]
    assert losses[1] == losses[2] == losses[0]
    saved, *recomputed = (weights_in(trainer) for trainer in trainers)
    assert all(torch.equal(weights[name], saved[name]) for weights in recomputed for name in saved)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_plan_matches_ordinary_training(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    clip = data.draw(st.sampled_from((None, 0.5))) if plan.update_at == "forward" else None
    assert_trains_as_reference(model, plan, STEPS, clip, ShuffledStreams(data.draw(st.integers(0, 999))))


def test_updates_match_with_the_default_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the epsilon that runs have, where all but a few weights in ten thousand can be compared."""
    monkeypatch.undo()
    trainer = trainer_of(UNTIED, LEAST)
    trained(trainer, 1)
    network, weights = train_reference(UNTIED, LEAST, 1, None, eps=EPS)[2], weights_in(trainer)
    apart = torch.cat([(weights[name] - p.detach()).abs().flatten() for name, p in network.named_parameters()])
    assert (apart < 1e-6).float().mean() > 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("case", "update"), by_turns(((UNTIED, "FAI"), (POST_NORMS, "AIA")), UPDATES), ids=str)
def test_bf16_follows_fp32(case: tuple[Model, str], update: str) -> None:
    model, levels = case
    plan = replace(LEAST, update_at="forward", gbs=4, levels=levels)
    losses, norms, _ = train_reference(model, plan, 6, None)
    actual = trained(trainer_of(model, replace(plan, dtype="bf16", update=update), None, ShuffledStreams(2)), 6)
    assert actual[0] == pytest.approx(losses, rel=0.01)
    assert actual[1] == pytest.approx(norms, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe"),
    [(UNTIED, None), (QWEN3_BIAS, None), (UNTIED, "rowwise"),
     (replace(UNTIED, name="wide", hidden=128, ffn=128, heads=4, kv_heads=4, head_dim=32), "blockwise")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_fp8_gemms_follow_fp32(model: Model, recipe: str | None) -> None:
    plan = replace(LEAST, seqlen=32, chunk_tokens=16, levels="FAIFAI")
    losses, _, _ = train_reference(model, plan, STEPS, None)
    fp8_plan = replace(plan, dtype="fp8", fp8_recipe=recipe, update="stochastic")
    actual, _ = trained(trainer_of(model, fp8_plan), STEPS)
    assert actual == pytest.approx(losses, rel=0.03)
    assert actual != trained(trainer_of(model, replace(plan, dtype="bf16", update="stochastic")), STEPS)[0]


def test_master_weights_take_changes_that_bf16_cannot_hold() -> None:
    """A learning rate so small that most bf16 weights stay where they are when they are rounded to nearest."""
    moved = {}
    for update in UPDATES:
        trainer = trainer_of(UNTIED, replace(LEAST, gbs=1, dtype="bf16", update=update))
        trainer.lr = lambda _step: 1e-5
        before = weights_in(trainer)
        trained(trainer, 5)
        moved[update] = sum(int((after != before[name]).sum()) for name, after in weights_in(trainer).items())
    assert moved["nearest"] < 0.5 * min(moved["master"], moved["stochastic"])


def test_initial_weights_match_ordinary_training() -> None:
    trainer = trainer_of(TIED, replace(LEAST, resident_params=3))
    trainer.initialise()
    network = Llama(TIED)
    network.init_weights(SEED)
    weights = weights_in(trainer)
    assert all(torch.equal(weights[name], parameter) for name, parameter in network.named_parameters())


@pytest.mark.parametrize(("update_at", "clip"), [("forward", 1.0), ("forward", None), ("backward", None)])
def test_step_with_non_finite_gradients_changes_nothing(update_at: str, clip: float | None) -> None:
    trainer = trainer_of(UNTIED, replace(LEAST, update_at=update_at), clip)
    trainer.weights_of(2)[5] = torch.inf
    before = weights_in(trainer)
    loss, norm = trained(trainer, 1)
    assert not all(map(torch.isfinite, torch.tensor([*loss, *norm])))
    after = weights_in(trainer)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        (replace(UNTIED, gated=False), "bf16", "does not compute gated=False of small"),
        (AUTOGRAD, "fp8", "in fp8: .* pre_norms of no pre-norms must be True, got False; use dtype=bf16"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(model: Model, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_outofcore_model(model, dtype)
