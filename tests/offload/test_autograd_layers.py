"""Models whose layers autograd computes train out of core as in memory: biases, norms, windows, softcaps, experts.

Buffers are the fewest with which a step can be computed, so that every layer is evicted, and streams run in odd orders
that keep only what the program declares. All memory begins as NaN.
"""

from dataclasses import replace

import pytest
import torch
from model_table import TABLE_MODELS
from reference_training import (
    LEAST,
    SMOOTH,
    TIED,
    UNTIED,
    assert_trains_as_reference,
    train_reference,
    trained,
    trainer_of,
)  # fmt: skip
from shuffled_streams import ShuffledStreams
from small_models import grok1_model

from llmb.config.llama_layer_shapes import has_llama_layers
from llmb.config.native.outofcore_support import check_outofcore_model
from llmb.config.offload_plan import Plan
from llmb.config.spec import Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.layer_params import layer_param_shapes

STEPS = 2


def is_computed(model: Model) -> bool:
    """Return what the table of docs/models.md says."""
    try:
        check_outofcore_model(model, "bf16")
    except ConfigError:
        return False
    return True


COMPUTED = [model for model in TABLE_MODELS if is_computed(model)]
GROK_1 = grok1_model(
    name="no-aux-loss", logit_scale=0.6, embedding_scale=5.0, rope=RopeConfig(theta=10_000.0),
    experts=MoEConfig(count=8, top_k=2, ffn=40, renormalise=False, aux_loss=0.0),
)  # fmt: skip
CASES = [*(model for model in COMPUTED if not has_llama_layers(model)), GROK_1]
POST_NORMS = replace(UNTIED, name="post-norms", architecture="gemma3", qk_norm="head", post_norms=True)


def plan_of(model: Model, **changes: object) -> Plan:
    """Return two groups of three chunks a round, the last chunk and the last round short; attention saved or not."""
    shards = ParamBuckets(model).vocab_shards
    plan = replace(LEAST, gbs=3, chunk_tokens=4, groups_per_round=2, param_blocks=shards, grad_blocks=shards)
    return replace(plan, **({"levels": ("AIIAA" * model.layers * 2)[: model.layers * 6]} | changes))


@pytest.fixture(autouse=True)
def smooth_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger epsilon of Adam, so that weights can be compared as closely as gradients."""
    monkeypatch.setattr("llmb.offload.task_compute.EPS", SMOOTH)


def test_every_architecture_that_is_not_refused_is_compared() -> None:
    architectures = {model.architecture for model in CASES}
    assert architectures == {"llama", "olmo2", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "grok1"}


@pytest.mark.parametrize("model", CASES, ids=lambda model: f"{model.architecture}-{model.name}")
def test_every_variant_matches_training_in_memory(model: Model) -> None:
    assert_trains_as_reference(model, plan_of(model), STEPS, streams=ShuffledStreams(5))


@pytest.mark.parametrize("case", ["clipped in the next forward pass", "sequences share a chunk", "everything resident"])
def test_plans_match_training_in_memory(case: str) -> None:
    plans: dict[str, tuple[dict[str, object], float | None]] = {
        "clipped in the next forward pass": ({"update_at": "forward"}, 0.5),
        "sequences share a chunk": ({"seqs_per_group": 3, "chunk_tokens": 30, "gbs": 7, "levels": "IAIAAI"}, None),
        "everything resident": (
            {"resident_params": 7, "resident_grads": 7, "resident_states": 7, "param_blocks": 0, "grad_blocks": 0,
             "state_blocks": 0, "inp_slots": 24, "kv_slots": 6, "attn_slots": 18, "levels": "A" * 18}, None,
        ),
    }  # fmt: skip
    changes, clip = plans[case]
    assert_trains_as_reference(POST_NORMS, plan_of(POST_NORMS, **changes), STEPS, clip, ShuffledStreams(5))


@pytest.mark.parametrize("model", CASES, ids=lambda model: f"{model.architecture}-{model.name}")
def test_named_parameters_are_those_of_the_network(model: Model) -> None:
    with torch.device("meta"):
        layer = build_model(model).layers[-1]
    assert layer_param_shapes(model) == {
        name: tuple(dict(layer.named_parameters())[name].shape) for name in layer_param_shapes(model)
    }
    assert len(layer_param_shapes(model)) == len(list(layer.parameters()))
    ranks = [len(shape) > 1 for shape in layer_param_shapes(model).values()]
    assert ranks == sorted(ranks, reverse=True)  # those with weight decay first


def test_scaled_embeddings_and_logits_of_plain_layers() -> None:
    model = replace(TIED, name="scaled", embedding_scale=5.0, logit_scale=0.5, logit_softcap=3.0)
    assert has_llama_layers(model)
    assert_trains_as_reference(model, plan_of(model), STEPS, streams=ShuffledStreams(5))


@pytest.mark.parametrize("update", ["master", "stochastic"])
def test_bf16_follows_fp32(update: str) -> None:
    """Gradients accumulate in the dtype of their buffers; weights are rounded at random, or have master weights."""
    plan = plan_of(POST_NORMS, dtype="bf16", update=update)
    expected = train_reference(POST_NORMS, plan, STEPS, None)[0]
    assert trained(trainer_of(POST_NORMS, plan), STEPS)[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        (replace(UNTIED, gated=False), "bf16", "does not compute gated=False of small"),
        (replace(UNTIED, attn_logit_softcap=30.0), "fp8", "in fp8: .* attn_logit_softcap of small must be None"),
        (POST_NORMS, "fp8", "in fp8: .* post_norms of post-norms must be False, got True; use dtype=bf16"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(model: Model, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_outofcore_model(model, dtype)
