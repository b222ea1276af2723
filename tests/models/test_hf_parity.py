"""Networks against `transformers`: the same weights must give the same logits, loss, gradients and next tokens.

The reference is built from `to_hf_config`, and weights and gradients are read from files that it saved; both are tested
on their own in `test_hf_config.py` and `test_hf_weights.py`. Grok-1, which `transformers` has not: `test_grok1.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import assert_near, hf_network
from mixture_cases import MIXTURE_CASES
from small_models import GROUPED_MOE, MLA, deepseek_model, llama_model, nemotron_h_model
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from llmb.config.huggingface.hf_config import load_hf_config
from llmb.config.huggingface.mixtures import MIXTURES
from llmb.config.model import MambaConfig, Model, RopeConfig
from llmb.models.architectures import Network, build_model
from llmb.models.hf_weights import load_weights

# Relative to the largest value of each tensor, fp32; scans and routed experts add up in another order.
TOLERANCE = {
    "llama": 1e-5,
    "deepseek": 1e-4,
    "nemotron_h": 1e-4,
    **dict.fromkeys(MIXTURES, 1e-4),
}
SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "head_dim": 16, "vocab": 97}
MLA_SIZES = SIZES | {"head_dim": MLA.value_dim}
LLAMAS = [
    llama_model(name="multi-head", kv_heads=4, rope=RopeConfig(theta=10_000.0), **SIZES),
    llama_model(name="grouped", norm_eps=1e-6, **SIZES),
    llama_model(name="one-kv-head-tied", heads=6, kv_heads=1, tied_embeddings=True, **SIZES),
    # So short an original context that all three ranges of frequencies occur among the 8 pairs of a head.
    llama_model(
        name="llama3-scaling",
        rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=64, low_freq_factor=1.0, high_freq_factor=4.0),
        **SIZES,
    ),
]
DEEPSEEKS = [
    # So short an original context that pairs are unscaled, scaled and in between among the 4 of a head.
    deepseek_model(
        name="as-published",
        layers=3,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=256, mscale_all_dim=1.0),
        **MLA_SIZES,
    ),
    deepseek_model(
        name="one-group-two-shared",
        layers=3,
        experts=replace(GROUPED_MOE, groups=1, top_groups=1, shared=2, renormalise=False, scale=1.0, dense_layers=2),
        **MLA_SIZES,
    ),
    # Both bounds of YaRN are the same pair, as in Kimi K2.
    deepseek_model(
        name="kimi-k2",
        rope=RopeConfig(
            theta=100.0,
            scaling="yarn",
            factor=32.0,
            original_tokens=64,
            mscale_all_dim=1.0,
            beta_fast=1.0,
            beta_slow=1.0,
        ),
        experts=replace(GROUPED_MOE, groups=1, top_groups=1, scale=2.827),
        **MLA_SIZES,
    ),
    deepseek_model(
        name="yarn-without-mscale-tied",
        layers=3,
        rope=RopeConfig(theta=100.0, scaling="yarn", factor=8.0, original_tokens=64, beta_fast=4.0),
        experts=replace(GROUPED_MOE, dense_layers=0),
        tied_embeddings=True,
        **MLA_SIZES,
    ),
]
NEMOTRONS = [
    nemotron_h_model(
        "M-M*-M", name="groups", mamba=MambaConfig(heads=8, head_dim=16, groups=2, state=16, chunk=16), **SIZES
    ),
    nemotron_h_model(
        "*M-M",
        name="one-group-odd-sizes",
        kv_heads=4,
        norm_eps=1e-6,
        mamba=MambaConfig(heads=6, head_dim=12, groups=1, state=20, chunk=24, conv=3),
        **SIZES,
    ),
    nemotron_h_model(
        "MM*--",
        name="a-group-for-each-head",
        kv_heads=1,
        mamba=MambaConfig(heads=4, head_dim=8, groups=4, state=8, chunk=128),
        **SIZES,
    ),
]
MODELS = [*LLAMAS, *DEEPSEEKS, *NEMOTRONS, *MIXTURE_CASES]


def reference(model: Model) -> PreTrainedModel:
    """Return the network of `transformers`, with values so large that every tensor matters, norms and biases too."""
    network = hf_network(model)
    torch.manual_seed(7)
    biases = [(name, buffer) for name, buffer in network.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *biases):
            if name.endswith("A_log"):
                tensor.uniform_(-1.0, 1.5)
            elif name.endswith("dt_bias"):
                tensor.uniform_(-8.0, 0.0)  # some time steps come below the least, some are long
            else:
                is_norm = name.endswith(("norm.weight", "norm_f.weight"))
                tensor.copy_(torch.randn_like(tensor) * (0.1 if "bias" in name else 0.2) + is_norm)
    return network


def copy_of(network: PreTrainedModel, model: Model, folder: Path) -> Network:
    """Return our network with the weights of the reference."""
    network.save_pretrained(folder, max_shard_size="20KB")
    assert replace(load_hf_config(folder), name=model.name) == model
    copy = build_model(model)
    load_weights(copy, folder)
    return copy


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.architecture} {model.name}")
def test_logits_loss_and_gradients_match(model: Model, tmp_path: Path) -> None:
    expected, tolerance = reference(model), TOLERANCE[model.architecture]
    actual = copy_of(expected, model, tmp_path / "weights")
    tokens = torch.randint(model.vocab, (3, 131), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    actual_logits, logits = actual(inputs), expected(inputs, use_cache=False).logits
    assert_near(actual_logits, logits, "logits", tolerance)
    assert torch.equal(actual_logits.argmax(-1), logits.argmax(-1))
    loss, expected_loss = actual(inputs, labels), torch.nn.functional.cross_entropy(logits.mT, labels)
    assert_near(loss, expected_loss, "loss", tolerance)
    loss.backward()
    expected_loss.backward()
    for parameter in expected.parameters():
        parameter.data = parameter.data if parameter.grad is None else parameter.grad  # correction biases have none
    gradients = dict(copy_of(expected, model, tmp_path / "gradients").named_parameters())
    for name, parameter in actual.named_parameters():
        assert_near(parameter.grad, gradients[name].detach(), name, tolerance)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_model_of_a_mistral_3_with_its_vision_tower(tied: bool, tmp_path: Path) -> None:
    text = {"model_type": "mistral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None,
            "tie_word_embeddings": tied}  # fmt: skip
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
              "num_attention_heads": 2, "patch_size": 4, "image_size": 8, "head_dim": 8}  # fmt: skip
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, tie_word_embeddings=tied)
    network = AutoModelForImageTextToText.from_config(config).eval()
    network.save_pretrained(tmp_path / "weights")
    copy = build_model(load_hf_config(tmp_path / "weights"))
    load_weights(copy, tmp_path / "weights")
    assert copy.model.tied_embeddings == tied
    tokens = torch.arange(20)[None]
    assert_near(copy(tokens), network(tokens, use_cache=False).logits, "logits", 1e-5)
