"""Nemotron-H against `transformers`: the same weights must give the same logits, loss, gradients and next tokens."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_parity import assert_forward_parity, assert_near, greedy_decode
from small_models import nemotron_h_model
from torch import Tensor

from llmb.config.recipe import load_all, shipped
from llmb.config.spec import MambaConfig, Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.mamba2 import MambaMixer
from llmb.models.nemotron_h import NemotronH
from llmb.perfmodel import params

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import NemotronHConfig, NemotronHForCausalLM

TOLERANCE = 1e-4  # relative to the largest value of each tensor, fp32, in which both compute their scans

SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "head_dim": 16, "vocab": 97}
MODELS = [
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
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


def reference(model: Model) -> NemotronHForCausalLM:
    assert model.mamba is not None
    config = NemotronHConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        layers_block_type=[KINDS[letter] for letter in model.pattern or ""],
        intermediate_size=model.ffn,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        layer_norm_epsilon=model.norm_eps,
        mamba_num_heads=model.mamba.heads,
        mamba_head_dim=model.mamba.head_dim,
        n_groups=model.mamba.groups,
        ssm_state_size=model.mamba.state,
        chunk_size=model.mamba.chunk,
        conv_kernel=model.mamba.conv,
        attn_implementation="eager",
    )
    torch.manual_seed(7)
    network = NemotronHForCausalLM(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():  # large enough that every part matters, norms included
            if name.endswith("A_log"):
                parameter.uniform_(-1.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-8.0, 0.0)  # some time steps come below the least, some are long
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + name.endswith(("norm.weight", "norm_f.weight")))
    return network.eval()


def to_grouped_layout(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Reorder the rows of a reference tensor to the grouped layout of ours."""
    if model.mamba is None or not name.endswith(("inward.weight", "conv_weight", "conv_bias")):
        return tensor
    shape, heads = model.mamba, model.mamba.heads // model.mamba.groups
    sections = [heads * shape.head_dim, shape.state, shape.state]
    if name.endswith("inward.weight"):
        sections = [sections[0], *sections, heads]
    starts = [shape.groups * sum(sections[:number]) for number in range(len(sections))]
    actual = [
        expected
        for group in range(shape.groups)
        for start, width in zip(starts, sections, strict=True)
        for expected in range(start + group * width, start + (group + 1) * width)
    ]
    return tensor[actual]


def copy_of(expected: NemotronHForCausalLM, model: Model) -> NemotronH:
    actual = build_model(model)
    assert isinstance(actual, NemotronH)
    names = actual.hf_names(model)
    weights = dict(expected.named_parameters())
    with torch.no_grad():
        for name, parameter in actual.named_parameters():
            weight = weights.pop(names.pop(name))
            assert parameter.shape == weight.shape
            parameter.copy_(to_grouped_layout(name, weight, model))
    assert not weights, "every weight of the reference has its place"
    assert not names, "every name is that of a weight"
    return actual


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_logits_loss_and_gradients_match(model: Model) -> None:
    expected = reference(model)
    actual = copy_of(expected, model)
    tokens = torch.randint(model.vocab, (3, 72), generator=torch.Generator().manual_seed(1))
    assert_forward_parity(actual, expected, tokens, TOLERANCE)
    weights, names = dict(expected.named_parameters()), actual.hf_names(model)
    for name, parameter in actual.named_parameters():
        assert parameter.grad is not None, name
        assert_near(parameter.grad, to_grouped_layout(name, weights[names[name]].grad, model), name, TOLERANCE)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_greedy_decoding_matches(model: Model) -> None:
    expected = reference(model)
    actual = copy_of(expected, model)
    prompt = torch.randint(model.vocab, (2, 9), generator=torch.Generator().manual_seed(2))
    sequences = greedy_decode(actual, prompt)
    assert sequences == greedy_decode(lambda tokens: expected(tokens, use_cache=False).logits, prompt)
    assert len({token for text in sequences for token in text[9:]}) > 2, (
        "the reference repeats itself, nothing is compared"
    )


def test_network_is_causal() -> None:
    network = build_model(MODELS[0])
    network.init_weights(1)
    tokens = torch.arange(40)[None]
    later = tokens.clone()
    later[0, 25] = 90
    change = (network(tokens) - network(later)).abs().amax(-1)[0]
    assert change[:25].max() == 0
    assert change[25:].min() > 0


def test_initial_weights_depend_on_the_seed_and_initial_loss_is_log_vocab() -> None:
    network = build_model(MODELS[0])
    network.init_weights(1)
    first = {name: weight.clone() for name, weight in network.state_dict().items()}
    network.init_weights(1)
    assert all(torch.equal(weight, first[name]) for name, weight in network.state_dict().items())
    tokens = torch.arange(90)[None]
    loss = network(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(torch.tensor(97.0).log().item(), rel=0.02)


def test_mamba_parameters_are_initialized_as_published() -> None:
    network = build_model(replace(MODELS[0], mamba=MambaConfig(heads=512, head_dim=4, groups=2, state=4, chunk=8)))
    network.init_weights(1)
    mixer = next(module for module in network.modules() if isinstance(module, MambaMixer))
    steps, rates = F.softplus(mixer.dt_bias), mixer.a_log.exp()
    assert 0.00099 < steps.min() < 0.0012
    assert 0.09 < steps.max() < 0.1001
    assert steps.log().mean().exp().item() == pytest.approx(0.01, rel=0.2)
    assert 1.0 <= rates.min() < 1.2
    assert 15.8 < rates.max() <= 16.0
    assert (mixer.d == 1).all()
    assert 0.45 < mixer.conv_weight.abs().max() <= 0.5


@pytest.mark.parametrize("size", ["8b", "56b"])
def test_parameter_count_matches_the_cost_model(size: str) -> None:
    model = load_all([shipped()])["pretrain_nemotronh"].model(size)
    with torch.device("meta"):
        network = build_model(model)
    assert sum(parameter.numel() for parameter in network.parameters()) == params.parameters(model)


def test_every_weight_has_a_hf_name() -> None:
    with torch.device("meta"):
        network = build_model(MODELS[0])
    names = NemotronH.hf_names(MODELS[0])
    assert names.keys() == network.state_dict().keys()
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": None}, "must be 6 letters of M"),
        ({"pattern": "M-M*-"}, "must be 6 letters of M .*, got 'M-M"),
        ({"pattern": "M-ME-M"}, "must be 6 letters of M"),
        ({"mamba": None}, "needs the field mamba"),
        (
            {"mamba": MambaConfig(heads=8, head_dim=16, groups=3, state=16, chunk=16)},
            "groups=3 does not divide heads=8",
        ),
        ({"mamba": MambaConfig(heads=8, head_dim=16, groups=2, state=16, chunk=0)}, "chunk=0: must be at least 1"),
        ({"rope": RopeConfig()}, "needs rope: null"),
        ({"gated": True}, "needs rope: null and gated: false"),
        ({"tied_embeddings": True}, "tied_embeddings=true"),
        ({"experts": MoEConfig(count=4, top_k=2, ffn=8)}, "experts"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
    ],
)
def test_unsupported_fields_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(MODELS[0], **change))
