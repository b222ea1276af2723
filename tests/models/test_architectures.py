"""Properties of networks of every architecture: causality, initial weights, tensors, rejected fields."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_cases import DENSE_CASES
from mixture_cases import MIXTURE_CASES
from published_models import MIXTURES
from small_models import MLA, SMALL_MODELS
from test_hf_parity import MODELS

from llmb.config.model import MambaConfig, Model, MoEConfig, RopeConfig
from llmb.config.recipe import load_all, shipped
from llmb.errors import ConfigError
from llmb.models.architectures import ARCHITECTURES, Network, build_model
from llmb.perfmodel import params

MAMBA = MambaConfig(heads=8, head_dim=16, groups=2, state=16, chunk=16)
PUBLISHED = [
    *(recipe.model(size) for recipe in load_all([shipped()]).values() for size in recipe.sizes),
    *MIXTURES,  # which no recipe has
]


def network_of(name: str) -> Network:
    network = build_model(SMALL_MODELS[name])
    network.init_weights(1)
    return network


def test_every_architecture_has_a_small_and_a_published_model() -> None:
    assert {ARCHITECTURES[name] for name in SMALL_MODELS} == set(ARCHITECTURES.values())
    others = ARCHITECTURES.keys() - SMALL_MODELS.keys()  # of the same networks; test_published_dense.py counts them
    assert others <= {model.architecture for model in (*DENSE_CASES, *MIXTURE_CASES)}
    assert SMALL_MODELS.keys() <= {model.architecture for model in PUBLISHED}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_initial_weights_depend_on_the_seed_and_initial_loss_is_log_vocab(name: str) -> None:
    network, second = network_of(name), network_of(name)
    assert all(torch.equal(weight, second.state_dict()[key]) for key, weight in network.state_dict().items())
    second.init_weights(2)
    assert not torch.equal(second.embedding.weight, network.embedding.weight)
    tokens = torch.arange(90)[None]
    loss = network(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(SMALL_MODELS[name].vocab), rel=0.05)  # with auxiliary losses


@pytest.mark.parametrize("model", [*SMALL_MODELS.values(), *MODELS, *PUBLISHED], ids=lambda model: model.name)
def test_parameter_count_matches_the_cost_model_and_every_tensor_has_a_hf_name(model: Model) -> None:
    with torch.device("meta"):
        network = build_model(model)
    assert sum(tensor.numel() for tensor in network.state_dict().values()) == params.parameters(model)
    names = network.hf_names(model)
    assert names.keys() == network.state_dict().keys()
    parts = Counter(names.values())
    fused = {hf_name for hf_name, count in parts.items() if count > 1}
    assert fused == {
        names[name] for name, layout in network.hf_layouts(model).items() if getattr(layout, "parts", 1) > 1
    }


REJECTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"architecture": "gpt2"}, "'gpt2' is not supported; choices are: llama"),
        ({"experts": MoEConfig(count=4, top_k=2, ffn=8)}, "not experts"),
        ({"gated": False}, "not gated=false"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"head_dim": 7}, "must be even"),
        ({"rope": RopeConfig(scaling="longrope", long_factors=(1.0,))}, "one for each rotated pair, not 0 and 1"),
    ],
    "grok1": [
        ({"experts": None}, "a grok1 needs the field experts"),
        ({"experts": MoEConfig(count=4, top_k=2, ffn=8, shared=1)}, "a grok1 cannot have shared=1"),
        ({"experts": MoEConfig(count=4, top_k=5, ffn=8)}, "top_k=5 must be 1 to 4"),
        ({"experts": MoEConfig(count=6, top_k=2, ffn=8, groups=4)}, "6 experts .* top_groups=1 of groups=4"),
        ({"experts": MoEConfig(count=6, top_k=2, ffn=8, groups=3, top_groups=4)}, "top_groups=4 of groups=3"),
        ({"experts": MoEConfig(count=6, top_k=2, ffn=8, groups=6)}, "more than the experts in top_groups"),
        ({"rope": None}, "needs the field rope"),
        ({"rope": RopeConfig(scaling="llama3")}, "rope scaling of a grok1 is not supported"),
        ({"gated": False}, "a grok1 cannot have gated=false"),
        ({"mla": MLA}, "cannot have mla="),
    ],
    "deepseek": [
        ({"mla": None}, "a deepseek needs the field mla"),
        ({"experts": None}, "a deepseek needs the field experts"),
        ({"rope": None}, "a deepseek needs the field rope"),
        ({"post_norms": True}, "a deepseek cannot have post_norms=true"),
        ({"attn_logit_softcap": 30.0}, "a deepseek cannot have attn_logit_softcap=30.0"),
        ({"mla": replace(MLA, rope_dim=7)}, "rope_dim=7 must be even"),
    ],
    "nemotron_h": [
        ({"pattern": None}, "must be 5 letters of M"),
        ({"pattern": "M-M*"}, "must be 5 letters of M .*, got 'M-M"),
        ({"pattern": "M-ME-"}, "must be 5 letters of M"),
        ({"mamba": None}, "needs the field mamba"),
        ({"mamba": replace(MAMBA, groups=3)}, "groups=3 does not divide heads=8"),
        ({"mamba": replace(MAMBA, chunk=0)}, "chunk=0: must be at least 1"),
        ({"rope": RopeConfig()}, "needs rope: null"),
        ({"gated": True}, "needs rope: null and gated: false"),
        ({"tied_embeddings": True}, "tied_embeddings=true"),
        ({"experts": MoEConfig(count=4, top_k=2, ffn=8)}, "experts"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *rejected) for name, listed in REJECTED.items() for rejected in listed]
)
def test_unsupported_fields_are_rejected(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(SMALL_MODELS[name], **change))
