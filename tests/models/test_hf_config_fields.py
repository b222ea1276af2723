"""Every field of a config.json that changes logits in `transformers` is honoured or refused by its name.

The fields are those of the config classes of the installed `transformers`, so that a new one cannot slip by: each is
changed, and then our logits are those of `transformers`, or our error names the field.
"""

import inspect
import json
import random
import re
import sys
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cases import DENSE_CASES
from huggingface_hub.errors import StrictDataclassError
from mixture_cases import MIXTURE_CASES
from published_models import GPT_OSS_20B
from small_models import deepseek_model, llama_model, nemotron_h_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_rope_utils
from transformers.utils import logging

from llmb.config.huggingface.hf_config import ALIASES, from_hf_config, to_hf_config
from llmb.config.model import Model, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights

TOLERANCE = 1e-4  # relative to the largest logit, fp32
EXPERT_COUNTS = {"moe_num_experts", "n_routed_experts", "num_local_experts", "num_experts"}
LEFT_OUT = "left out"  # in place of a value
TOKENS = torch.arange(48).reshape(1, 48) * 7 % 61

MODELS: dict[str, Model] = {
    to_hf_config(model)["model_type"]: model
    for model in (*DENSE_CASES, *MIXTURE_CASES)
    if model.rope.scaling in ("none", "linear")  # others are among the changes
} | {
    "llama": llama_model(rope=RopeConfig(theta=100.0, scaling="llama3", factor=8.0, original_tokens=64)),
    "deepseek_v3": deepseek_model(
        rope=RopeConfig(theta=100.0, scaling="yarn", factor=8.0, original_tokens=64, mscale_all_dim=1.0)
    ),
    "nemotron_h": nemotron_h_model("M-*-"),
}
# Values to try where another of the same type says nothing, or is invalid.
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"],
    "mlp_hidden_act": ["silu", "gelu"],
    "mamba_hidden_act": ["gelu", "relu"],
    "layers_block_type": [["linear_attention", "full_attention", "mlp", "mlp"]],
    "layer_types": [
        ["linear_attention", "full_attention", "mlp", "mlp"],
        *([kind] * count for kind in ("full_attention", "sliding_attention") for count in (2, 3, 4)),
    ],
    "hybrid_override_pattern": ["M*--"],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4],
    "head_dim": [16],
    "hidden_size": [64],
    "n_group": [2],
    "topk_group": [1, 3],
    "num_experts_per_tok": [1, 2],
    "first_k_dense_replace": [0, 2],
    "n_routed_experts": [4],
    "n_groups": [1, 3],
    "mamba_n_groups": [1, 3],
    "mamba_dt_min": [0.3],
    "mamba_d_conv": [2],
    "mamba_chunk_size": [8],
    "mamba_conv_bias": [False],
    "time_step_min": [0.3],
    "mamba_dt_limit": [[0.0, 0.1]],
    "time_step_limit": [[0.0, 0.1]],
    "sliding_window": [4],
    "moe_latent_size": [8],
    "q_lora_rank": [None, 16],
    "num_local_experts": [4],
    "partial_rotary_factor": [0.5],
    "attention_factor": [1.5],
    "truncate": [False],
    "mscale": [0.5],
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope"],
    "use_bidirectional_attention": [True],
    "final_logit_softcapping": [2.0],
    "attn_logit_softcapping": [2.0],
    "router_jitter_noise": [0.5],
    "num_hidden_layers": [1],
    "clip_qkv": [0.1],
    "mamba_ssm_cache_dtype": ["bfloat16"],
}
# What other types of RoPE need, where a config.json has another.
ROPE: dict[str, Any] = {
    "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
# Read by `transformers` from tokens, training or generation, never by the network; the shape of the class itself.
NOT_OF_THE_NETWORK = {
    "transformers_version", "architectures", "model_type", "_name_or_path", "dtype", "id2label", "label2id",
    "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "is_encoder_decoder",
}  # fmt: skip

# What `transformers` raises for values that it does not take.
INVALID_CONFIG = (
    RuntimeError, TypeError, ValueError, KeyError, AttributeError, AssertionError, StrictDataclassError,
)  # fmt: skip
# Fields of which `transformers` itself refuses all new values, or fails with them.
INVALID: dict[str, set[str]] = {
    "llama": {"partial_rotary_factor"},
    "qwen2": {"use_sliding_window"},
    "qwen3": {"layer_types"},
    "smollm3": {"layer_types"},
    "phi3": {"rope_scaling", "long_factor", "short_factor"},
    "olmo3": {"rope_scaling"},
    "gemma3_text": {"rope_scaling"},
    "deepseek_v3": {
        "num_attention_heads", "num_key_value_heads", "n_routed_experts", "num_local_experts", "qk_rope_head_dim",
        "head_dim", "partial_rotary_factor",
    },
    "ernie4_5_moe": {"num_experts"},
    "olmoe": {"head_dim", "hidden_size", "num_attention_heads"},
    "dots1": {"n_routed_experts", "num_local_experts"},
    "glm4_moe": {"n_routed_experts", "num_local_experts"},
    "nemotron_h": {"mamba_dt_max", "mamba_dt_init_floor", "mtp_hybrid_override_pattern"},
}  # fmt: skip

logging.set_verbosity_error()
logging.disable_progress_bar()


def reference(config: dict[str, Any]) -> PreTrainedModel:
    """Build the network of a config.json, each tensor with values that depend on its name and shape alone."""
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(json.dumps(config))), attn_implementation="eager"
    )
    network.set_experts_implementation("eager") if EXPERT_COUNTS & config.keys() else None
    buffers = [(name, buffer) for name, buffer in network.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *buffers):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(noise + (1.0 if "norm" in name else -2.0 if name.endswith("dt_bias") else 0.0))
    return network.eval()


def logits_of(network: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return network(TOKENS, use_cache=False).logits


def our_logits(model: Model, folder: Path) -> Tensor:
    network = build_model(model)
    load_weights(network, folder)
    with torch.no_grad():
        return network(TOKENS)


def differ(left: Tensor, right: Tensor) -> bool:
    return left.shape != right.shape or bool((left - right).abs().max() > TOLERANCE * right.abs().max())


def base_config(model_type: str) -> dict[str, Any]:
    """Return the config.json of a small model with every field that its class has."""
    written = to_hf_config(MODELS[model_type])
    return json.loads(json.dumps(AutoConfig.for_model(**written).to_dict()))


def fields(model_type: str, base: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield every field that `transformers` reads, with its section: of the class, its older names, RoPE's."""
    kind = type(AutoConfig.for_model(model_type))
    older = re.findall(r'kwargs\.pop\("(\w+)"', inspect.getsource(sys.modules[kind.__module__]))
    for name in dict.fromkeys((*base, *kind.attribute_map, *older)):
        if name not in (*NOT_OF_THE_NETWORK, "rope_parameters"):
            yield name, None
    if "rope_parameters" in base:
        source = inspect.getsource(modeling_rope_utils)
        for name in dict.fromkeys(re.findall(r'rope_parameters(?:_dict)?(?:\.get\(|\[)"(\w+)"', source)):
            yield name, "rope_parameters"
        yield "rope_type", "rope_parameters"


def other_values(name: str, value: Any) -> list[Any]:
    if name in VALUES:
        return [other for other in VALUES[name] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2 or 1]
    return [2] if value is None else [value]


def changes(model_type: str, base: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each field, its new value and the changed config.json."""
    for name, section in fields(model_type, base):
        for value in other_values(name, (base[section] if section else base).get(name)):
            change: dict[str, Any] = {name: value}
            if name == "rope_type":
                change |= ROPE
            if value == "longrope":
                pairs = int(build_model(MODELS[model_type]).rope_dim * base.get("partial_rotary_factor", 1.0)) // 2
                change |= {"short_factor": [1.5] * pairs, "long_factor": [2.5] * pairs}
            if name == "num_hidden_layers" and base.get("layer_types"):
                change["layer_types"] = base["layer_types"][:value]
            yield name, value, base | (change if section is None else {section: base[section] | change})
        if section is None:
            yield name, LEFT_OUT, {field: value for field, value in base.items() if field != name}


def problem_of(names: Collection[str], config: dict[str, Any], network: PreTrainedModel, folder: Path) -> str | None:
    """Return what is wrong with how we read a changed config.json; None: honoured as there, or refused by name."""
    expected = logits_of(network)
    try:
        network.save_pretrained(folder)
        actual = our_logits(from_hf_config(config), folder)
    except ConfigError as error:
        return None if any(name in str(error) for name in names) else f"refused without its name: {error}"
    if not differ(actual, expected):
        return None
    return f"logits differ by {((actual - expected).abs().max() / expected.abs().max()).item():.0%}"


# RoPE as files of older and newer versions of `transformers` describe it.
ROPE_SECTIONS: list[dict[str, Any]] = [
    {},
    {"rope_type": "default", "rope_theta": 50.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "type": "linear", "factor": 4.0, "beta_fast": None},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16, "truncate": None},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_slow": 8.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [2.5] * 4},
    {"type": "default", "mrope_section": [1, 1, 2]},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": None},
    {"full_attention": {"type": "yarn", "factor": 4.0}, "sliding_attention": {"rope_theta": 50.0}},
]
# Beside such a section.
ROPE_FIELDS: list[dict[str, Any]] = [
    {"rope_theta": 100.0},
    {},
    {"max_position_embeddings": 64, "original_max_position_embeddings": 8},
]


def rope_configs(base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config.json for each section, under both names, alone and beside the newer one of the base."""
    bare = {name: value for name, value in base.items() if not name.startswith("rope_")}
    for fields_beside in ROPE_FIELDS:
        for section in ROPE_SECTIONS:
            for alone in ({"rope_scaling": section}, {"rope_parameters": section}):
                yield bare | fields_beside | alone
            yield base | fields_beside | {"rope_scaling": section}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=() if each in ("llama", "gemma3_text", "gpt_oss") else pytest.mark.nightly)
        for each, model in MODELS.items()
        if model.rope
    ],
)
def test_rope_sections_are_read_as_transformers_reads_them(model_type: str, tmp_path: Path) -> None:
    base, problems, compared = base_config(model_type), {}, 0
    for number, config in enumerate(rope_configs(base)):
        try:
            network = reference(config)
            logits_of(network)
        except INVALID_CONFIG:
            continue
        compared += 1
        rope = {name: value for name, value in config.items() if name.startswith("rope_")}
        names = {"rope_", *rope.get("rope_scaling", {}), *rope.get("rope_parameters", {})}
        if (problem := problem_of(names, config, network, tmp_path / str(number))) is not None:
            problems[str(rope)] = problem
    assert compared > 30
    assert not problems, "\n".join(f"{section}: {problem}" for section, problem in problems.items())


IN_EVERY_TEST_RUN = {"llama", "phi3", "gemma2", "deepseek_v3", "nemotron_h"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in IN_EVERY_TEST_RUN else pytest.mark.nightly) for each in MODELS],
)
def test_every_field_is_honoured_or_refused(model_type: str, tmp_path: Path) -> None:
    base = base_config(model_type)
    network = reference(base)
    network.save_pretrained(tmp_path / "base")
    assert not differ(our_logits(from_hf_config(base), tmp_path / "base"), logits_of(network))
    problems, invalid, valid = {}, set(), set()
    for number, (name, value, config) in enumerate(changes(model_type, base)):
        try:
            changed = reference(config)
            logits_of(changed)
        except INVALID_CONFIG:
            invalid.add(name)
            continue
        if value is not LEFT_OUT:
            valid.add(name)
        names = {name, ALIASES.get(model_type, {}).get(name, name)}
        if (problem := problem_of(names, config, changed, tmp_path / str(number))) is not None:
            problems[f"{name}={value}"] = problem
    assert invalid - valid == INVALID.get(model_type, set())
    assert not problems, "\n".join(f"{field}: {problem}" for field, problem in problems.items())


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=() if each in ("qwen3", "glm4") else (pytest.mark.slow, pytest.mark.nightly))
        for each in MODELS
    ],
)
def test_null_is_read_as_transformers_reads_it(model_type: str, tmp_path: Path) -> None:
    """Published files have null for head_dim, num_key_value_heads, sliding_window, rope_scaling, biases."""
    base, compared = base_config(model_type), 0
    for name, section in fields(model_type, base):
        config = base | {name: None}
        try:
            network = reference(config)
            logits_of(network)
        except INVALID_CONFIG:
            continue
        if section is None:
            compared += 1
            names = {name, ALIASES.get(model_type, {}).get(name, name)}
            assert problem_of(names, config, network, tmp_path / name) is None, name
    assert compared > 3


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_several_fields_at_once_are_honoured_or_refused(model_type: str, tmp_path: Path) -> None:
    """Combinations of two to four of the changes above, drawn at random."""
    base, draw, problems, compared = base_config(model_type), random.Random(5), {}, 0
    single = [{name: config[name] for name in config if config[name] != base.get(name)}
              for _, value, config in changes(model_type, base) if value is not LEFT_OUT]  # fmt: skip
    for number in range(120):
        change = {name: value for each in draw.sample(single, draw.randint(2, 4)) for name, value in each.items()}
        try:
            changed = reference(base | change)
            logits_of(changed)
        except INVALID_CONFIG:
            continue
        compared += 1
        names = {*base, *change, *ALIASES.get(model_type, {}).values(), *change.get("rope_parameters", {})}
        if (problem := problem_of(names, base | change, changed, tmp_path / str(number))) is not None:
            problems[str(change)] = problem
    assert compared > 20
    assert not problems, "\n".join(f"{change}: {problem}" for change, problem in problems.items())


@pytest.mark.parametrize("model_type", MODELS)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(model_type: str) -> None:
    """At full size, with more heads than any default number of key-value heads."""
    sizes = {"num_attention_heads": 64, "hidden_size": 64 * 128}
    without_default: dict[str, Any] = {
        "nemotron_h": {"layers_block_type": ["mamba", "mlp"]},
        "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    }.get(model_type, {})
    config = json.loads(json.dumps(AutoConfig.for_model(model_type, **sizes, **without_default).to_dict()))
    model = from_hf_config(config)
    for name in config.keys() - {"model_type", *without_default, *sizes}:
        shorter = {field: value for field, value in config.items() if field != name}
        try:
            assert from_hf_config(shorter) == model, name
        except ConfigError as error:
            names = {name, ALIASES.get(model_type, {}).get(name, name)}
            assert any(name in str(error) for name in names), f"{name}: {error}"


def test_other_names_of_a_field_are_read_too() -> None:
    base = base_config("nemotron_h")
    for alias, field in ALIASES["nemotron_h"].items():
        renamed = {name: value for name, value in base.items() if name != field} | {alias: base[field]}
        assert from_hf_config(renamed) == from_hf_config(base), alias
    with pytest.raises(ConfigError, match=r"mamba_dt_min=0\.3 is not supported; only 0\.001 is"):
        from_hf_config({name: value for name, value in base.items() if name != "time_step_min"} | {"mamba_dt_min": 0.3})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", [64], "head_dim: expected a whole number"),
        ("head_dim", 10**400, "head_dim: .* must be at least 1 and at most"),
        ("num_hidden_layers", 2**31, "num_hidden_layers: 2147483648 must be at least 1 and at most 16,777,216"),
    ],
)
def test_sizes_of_a_mixture_are_checked_before_they_are_used(field, value, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(to_hf_config(GPT_OSS_20B) | {field: value})
