"""Llama against `transformers`: the same weights must give the same logits, loss and gradients."""

from typing import Any

import pytest
import torch
from hf_parity import assert_forward_parity, assert_near, greedy_decode
from small_models import llama_model
from transformers import LlamaConfig, LlamaForCausalLM

from llmb.config.spec import Model, RopeConfig
from llmb.models.architectures import build_model
from llmb.models.llama import Llama
from llmb.perfmodel import params

TOLERANCE = 1e-5  # relative to the largest value of each tensor, fp32

SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "head_dim": 16, "vocab": 97}
MODELS = [
    llama_model(name="multi-head", kv_heads=4, rope=RopeConfig(theta=10_000.0), **SIZES),
    llama_model(name="grouped", norm_eps=1e-6, **SIZES),
    llama_model(name="one-kv-head-tied", heads=6, kv_heads=1, tied_embeddings=True, **SIZES),
    llama_model(
        name="llama3-scaling",
        # So short an original context that all three ranges of frequencies occur among the 8 pairs of a head.
        rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=64, low_freq_factor=1.0, high_freq_factor=4.0),
        **SIZES,
    ),
]


def reference(model: Model) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": model.rope.theta}
    if model.rope.scaling == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": model.rope.factor,
            "original_max_position_embeddings": model.rope.original_tokens,
            "low_freq_factor": model.rope.low_freq_factor,
            "high_freq_factor": model.rope.high_freq_factor,
        }
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied_embeddings,
        rope_parameters=rope,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    torch.manual_seed(7)
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():  # large enough that every part of the network matters, norms included
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return network


def copy_of(hf_output: LlamaForCausalLM, model: Model) -> Llama:
    actual = build_model(model)
    assert isinstance(actual, Llama)
    weights, names = dict(hf_output.named_parameters()), Llama.hf_names(model)
    with torch.no_grad():
        for name, parameter in actual.named_parameters():
            parameter.copy_(weights.pop(names.pop(name)))
    assert not names, "every name is of a weight of ours"
    assert not weights, "every weight of the reference has its place"
    return actual


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_logits_loss_and_gradients_match(model: Model) -> None:
    hf_output = reference(model)
    actual = copy_of(hf_output, model)
    tokens = torch.randint(model.vocab, (3, 131), generator=torch.Generator().manual_seed(1))
    assert_forward_parity(actual, hf_output, tokens, TOLERANCE)
    weights, names = dict(hf_output.named_parameters()), Llama.hf_names(model)
    for name, parameter in actual.named_parameters():
        assert_near(parameter.grad, weights[names[name]].grad, name, TOLERANCE)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_greedy_decoding_matches(model: Model) -> None:
    hf_output = reference(model)
    actual = copy_of(hf_output, model)
    prompt = torch.randint(model.vocab, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = hf_output.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy_decode(actual, prompt) == expected.tolist()


def test_rope_scaling_changes_the_logits() -> None:
    plain, scaled = MODELS[1], MODELS[3]
    actual = copy_of(reference(scaled), scaled)
    unscaled = build_model(plain)
    unscaled.load_state_dict(actual.state_dict())
    tokens = torch.arange(97)[None]
    assert (actual(tokens) - unscaled(tokens)).abs().max() > 1e-2


@pytest.mark.slow
def test_parameter_count_matches_the_cost_model(recipes) -> None:
    published = [recipe.model(size) for recipe in recipes.values() for size in recipe.sizes]
    llamas = [model for model in published if model.architecture == "llama"]
    assert {"8b", "70b", "405b"} <= set(recipes["pretrain_llama3.1"].sizes)
    for model in (*MODELS, *llamas):
        with torch.device("meta"):
            network = build_model(model)
        assert sum(p.numel() for p in network.parameters()) == params.parameters(model), model.name
        assert network.state_dict().keys() == Llama.hf_names(model).keys()
