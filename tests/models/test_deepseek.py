"""DeepSeek-V3 against `transformers`: the same weights must give the same logits, loss, gradients and tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import assert_forward_parity, assert_near, greedy_decode
from small_models import GROUPED_MOE, MLA, deepseek_model
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Model, Parallel, Precision, RopeConfig, RunConfig, Training
from llmb.errors import ConfigError
from llmb.events import RunEnded, StepDone, read
from llmb.models.architectures import build_model
from llmb.models.deepseek import DeepSeek
from llmb.perfmodel import params
from llmb.runtime.recorder import EventRecorder
from llmb.train.__main__ import run

TOLERANCE = 1e-4  # relative to the largest value of each tensor, fp32

SIZES: dict[str, Any] = {"layers": 3, "hidden": 48, "ffn": 80, "head_dim": 16, "vocab": 97}
MODELS = [
    deepseek_model(
        name="as-published",
        norm_eps=1e-6,
        # So short an original context that pairs are unscaled, scaled and in between among the 4 of a head.
        rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=256, mscale_all_dim=1.0),
        **SIZES,
    ),
    deepseek_model(
        name="one-group-two-shared",
        experts=replace(GROUPED_MOE, groups=1, top_groups=1, shared=2, renormalise=False, scale=1.0, dense_layers=2),
        **SIZES,
    ),
    deepseek_model(
        name="yarn-without-mscale-tied",
        rope=RopeConfig(theta=100.0, scaling="yarn", factor=8.0, original_tokens=64, beta_fast=4.0),
        experts=replace(GROUPED_MOE, dense_layers=0),
        tied_embeddings=True,
        **SIZES,
    ),
]


def reference(model: Model) -> DeepseekV3ForCausalLM:
    experts, latent = model.experts, model.mla
    rope = {"rope_type": "default", "rope_theta": model.rope.theta}
    if model.rope.scaling == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": model.rope.factor,
            "original_max_position_embeddings": model.rope.original_tokens,
            "beta_fast": model.rope.beta_fast,
            "beta_slow": model.rope.beta_slow,
            "mscale": model.rope.mscale_all_dim,
            "mscale_all_dim": model.rope.mscale_all_dim,
        }
        if not model.rope.mscale_all_dim:
            rope["attention_factor"] = 1.0
    config = DeepseekV3Config(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        moe_intermediate_size=experts.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        n_routed_experts=experts.count,
        n_shared_experts=experts.shared,
        num_experts_per_tok=experts.top_k,
        first_k_dense_replace=experts.dense_layers,
        n_group=experts.groups,
        topk_group=experts.top_groups,
        norm_topk_prob=experts.renormalise,
        routed_scaling_factor=experts.scale,
        q_lora_rank=latent.q_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied_embeddings,
        rope_parameters=rope,
        max_position_embeddings=512,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    torch.manual_seed(7)
    network = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():  # large enough that every part of the network matters, norms included
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return network.eval()


def hf_tensors(network: DeepseekV3ForCausalLM, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by their names in published files, where experts are separate."""
    tensors = {}
    for name, value in values.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            tensors |= {name.replace("gate_up_proj", "{expert}.gate_proj.weight"): gate}
            tensors |= {name.replace("gate_up_proj", "{expert}.up_proj.weight"): up}
        elif name.endswith("experts.down_proj"):
            tensors[name.replace("down_proj", "{expert}.down_proj.weight")] = value
        else:
            tensors[name] = value
    return tensors


def copy_of(hf_output: DeepseekV3ForCausalLM, model: Model) -> DeepSeek:
    actual = build_model(model)
    assert isinstance(actual, DeepSeek)
    values = dict(hf_output.named_parameters())
    values |= {name: buffer for name, buffer in hf_output.named_buffers() if name.endswith("correction_bias")}
    values = hf_tensors(hf_output, values)
    names = DeepSeek.hf_names(model)
    assert names.keys() == actual.state_dict().keys(), "every tensor of ours has a Hugging Face name"
    with torch.no_grad():
        for name, tensor in actual.state_dict().items():
            tensor.copy_(values.pop(names[name]))
    assert not values, "every tensor of the reference has its place"
    return actual


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_logits_loss_and_gradients_match(model: Model) -> None:
    hf_output = reference(model)
    actual = copy_of(hf_output, model)
    tokens = torch.randint(model.vocab, (3, 131), generator=torch.Generator().manual_seed(1))
    assert_forward_parity(actual, hf_output, tokens, TOLERANCE)
    grads = hf_tensors(hf_output, {name: parameter.grad for name, parameter in hf_output.named_parameters()})
    names = DeepSeek.hf_names(model)
    for name, parameter in actual.named_parameters():
        assert_near(parameter.grad, grads[names[name]], name, TOLERANCE)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_greedy_decoding_matches(model: Model) -> None:
    hf_output = reference(model)
    actual = copy_of(hf_output, model)
    prompt = torch.randint(model.vocab, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = hf_output.generate(
        prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert greedy_decode(actual, prompt) == expected.tolist()


@pytest.mark.parametrize("change", [{"factor": 20.0}, {"mscale_all_dim": 0.5}, {"beta_fast": 2.0}, {"beta_slow": 0.2}])
def test_every_yarn_field_changes_the_logits(change: dict) -> None:
    model = MODELS[0]
    actual = build_model(model)
    actual.init_weights(1)
    for parameter in actual.parameters():
        parameter.data.mul_(10)
    changed = build_model(replace(model, rope=replace(model.rope, **change)))
    changed.load_state_dict(actual.state_dict())
    tokens = torch.arange(97)[None]
    assert (actual(tokens) - changed(tokens)).abs().max() > 1e-4


def test_router_bias_affects_the_selection_only() -> None:
    network = build_model(MODELS[1])
    network.init_weights(1)
    router = network.layers[2].mlp.router
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(2))
    weights, chosen = router(x)
    router.bias += 0.7  # the same for all: nothing changes
    assert torch.equal(router(x)[1], chosen)
    torch.testing.assert_close(router(x)[0], weights)
    router.bias[5] += 10.0
    weights, chosen = router(x)
    assert (chosen == 5).any(dim=1).all()
    assert weights.max() < 1


def test_parameter_count_matches_the_cost_model(recipes) -> None:
    published = recipes["inference_deepseek-r1"].model("671b")
    for model in (*MODELS, published):
        with torch.device("meta"):
            network = build_model(model)
        count = sum(tensor.numel() for tensor in network.state_dict().values())
        assert count == params.parameters(model)
        assert network.state_dict().keys() == DeepSeek.hf_names(model).keys()
    assert count == 671_026_419_200


CONFIG = RunConfig(
    name="tiny-deepseek",
    target="pretrain_deepseek",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
    model=replace(MODELS[0], experts=replace(GROUPED_MOE, aux_loss=0.01)),
    parallel=Parallel(),
    precision=Precision(dtype="fp32"),
    workload=Training(seqlen=32, mbs=4, gbs=4, ga=1, steps=4, window=(3, 4), lr=1e-2),
)


def losses_of(folder: Path, dtype: str, **work: int) -> list[float]:
    folder.mkdir()
    config = replace(CONFIG, precision=Precision(dtype=dtype), workload=replace(CONFIG.workload, **work))
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    assert run(folder / "config.json", EventRecorder(folder, 0)) == 0
    *events, ended = read(folder / "events.rank0.jsonl")
    assert isinstance(ended, RunEnded)
    assert ended.status == "ok"
    return [event.loss for event in events if isinstance(event, StepDone)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_engine_runs(tmp_path: Path, dtype: str) -> None:
    losses = losses_of(tmp_path / "run", dtype, steps=30)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_gives_the_same_losses(tmp_path: Path, dtype: str) -> None:
    plain = losses_of(tmp_path / "plain", dtype)
    assert losses_of(tmp_path / "recomputed", dtype, recompute_layers=3) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla": None}, "a deepseek needs the field mla"),
        ({"experts": None}, "a deepseek needs the field experts"),
        ({"rope": None}, "a deepseek needs the field rope"),
        ({"post_norms": True}, "a deepseek cannot have post_norms=true"),
        ({"attn_logit_softcap": 30.0}, "a deepseek cannot have attn_logit_softcap=30.0"),
        ({"mla": replace(MLA, rope_dim=7)}, "rope_dim=7 must be even"),
    ],
)
def test_unsupported_fields_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(MODELS[0], **change))
