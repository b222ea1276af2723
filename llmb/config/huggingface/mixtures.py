"""config.json of mixtures of experts: Mixtral, Qwen3-MoE and gpt-oss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmb.config.huggingface.hf_fields import (
    SIZE_FIELDS,
    HfConfig,
    check_supported,
    from_hf,
    head_dim_of,
    positive_int,
    required,
    to_hf,
)
from llmb.config.huggingface.hf_rope import SCALED_ROPE_FIELDS, from_hf_rope
from llmb.config.huggingface.llama_like import LAYER_TYPES, LlamaLike, read_layer_types, shortest_period
from llmb.config.model import Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError

# What these have in common with dense models: all but the MLPs.
MIXTRAL = LlamaLike(
    architecture="mixtral",
    class_name="MixtralForCausalLM",
    defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    layers_by="sliding_window",
)
QWEN3_MOE = LlamaLike(
    architecture="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    fields={"qk_norm": "head"},
    defaults={"num_key_value_heads": 4},
)
YARN_FIELDS = SCALED_ROPE_FIELDS | {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
# What `transformers` takes for a gpt-oss whose config.json has no RoPE scaling: that of the published models.
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def to_mixtral(model: Model) -> HfConfig:
    experts = _experts_of(model)
    return MIXTRAL.write(model) | {
        "intermediate_size": experts.ffn,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
    }


def from_mixtral(config: HfConfig) -> dict[str, Any]:
    return MIXTRAL.read(config) | {
        "experts": {
            "count": required(config, "num_local_experts"),
            "top_k": required(config, "num_experts_per_tok"),
            "ffn": required(config, "intermediate_size"),
        },
    }


def to_qwen3_moe(model: Model) -> HfConfig:
    experts = _experts_of(model)
    return QWEN3_MOE.write(model) | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def from_qwen3_moe(config: HfConfig) -> dict[str, Any]:
    check_supported(config, {"decoder_sparse_step": 1, "use_sliding_window": False})
    if config.get("mlp_only_layers"):
        raise ConfigError(f"config.json: mlp_only_layers={config['mlp_only_layers']} is not supported; only [] is")
    return QWEN3_MOE.read(config) | {
        "experts": {
            "count": required(config, "num_experts"),
            "top_k": required(config, "num_experts_per_tok"),
            "ffn": required(config, "moe_intermediate_size"),
            "renormalise": config.get("norm_topk_prob", False),
        },
    }


def to_gpt_oss(model: Model) -> HfConfig:
    experts, rope, windowed = _experts_of(model), model.rope or RopeConfig(theta=0.0), "S" in model.attention_pattern
    by_letter = {letter: name for name, letter in LAYER_TYPES.items()}
    scaling = {"rope_type": "yarn", "truncate": rope.truncate, **to_hf(rope, YARN_FIELDS)}
    return {
        "architectures": [MIXTURES["gpt_oss"].class_name],
        "model_type": "gpt_oss",
        "head_dim": model.head_dim,
        "intermediate_size": experts.ffn,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": model.qkv_bias,
        "sliding_window": model.window if windowed else None,
        "layer_types": [by_letter.get(model.attention_kind(layer)) for layer in range(model.layers)],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling if rope.scaling == "yarn" else {"rope_type": "default"},  # none would mean GPT_OSS_YARN
        "max_position_embeddings": round(rope.original_tokens * rope.factor),
    }


def from_gpt_oss(config: HfConfig) -> dict[str, Any]:
    check_supported(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"})
    head_dim = head_dim_of({"head_dim": 64} | config)
    rope, factor = _yarn(config)
    layers = positive_int(config, "num_hidden_layers")
    alternating = (["sliding_attention", "full_attention"] * layers)[:layers]
    layer_types = config.get("layer_types") or alternating
    pattern = shortest_period(read_layer_types({"layer_types": layer_types}, layers))
    return from_hf(config, SIZE_FIELDS) | {
        "architecture": "gpt_oss",
        "head_dim": head_dim,
        "activation": "swigluoai",
        "norm_eps": required(config, "rms_norm_eps"),
        "qkv_bias": config.get("attention_bias", True),
        "o_bias": config.get("attention_bias", True),
        "attention_sinks": True,
        "attention_pattern": pattern,
        "window": required(config, "sliding_window") if "S" in pattern else None,
        "attention_scale": None if factor == 1.0 else head_dim**-0.5 * factor**2,
        "rope": rope,
        "experts": {
            "count": required(config, "num_local_experts"),
            "top_k": required(config, "num_experts_per_tok"),
            "ffn": required(config, "intermediate_size"),
            "bias": True,
        },
    }


def _yarn(config: HfConfig) -> tuple[dict[str, Any], float]:
    """Read YaRN, or RoPE without scaling, and return its factor on cosine and sine beside it."""
    if not config.get("rope_scaling") and config.get("rope_parameters") is None:
        config = config | {"rope_parameters": GPT_OSS_YARN}
    section = config.get("rope_scaling") or config["rope_parameters"]
    rope = from_hf_rope({"rope_theta": 150_000.0, **config}, ("yarn",))
    check_supported(section, dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim")))
    check_supported(rope, {"partial_rotary_factor": 1.0})
    return rope, rope.pop("attention_factor", 1.0)


def _experts_of(model: Model) -> MoEConfig:
    if model.experts is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field experts")
    return model.experts


@dataclass(frozen=True)
class Mixture:
    """Reads and writes the config.json of one architecture, whose name is its model_type."""

    class_name: str  # of `transformers`
    read: Callable[[HfConfig], dict[str, Any]]
    write: Callable[[Model], HfConfig]
    read_fields: frozenset[str] = frozenset()  # fields that other architectures support with one value only
    aliases: tuple[tuple[str, str], ...] = ()  # other names that `transformers` reads -> field of config.json


MIXTURES = {
    "mixtral": Mixture(
        MIXTRAL.class_name,
        from_mixtral,
        to_mixtral,
        frozenset({"sliding_window"}),
        (("num_experts", "num_local_experts"),),
    ),
    "qwen3_moe": Mixture(
        QWEN3_MOE.class_name, from_qwen3_moe, to_qwen3_moe, aliases=(("num_local_experts", "num_experts"),)
    ),
    "gpt_oss": Mixture(
        "GptOssForCausalLM",
        from_gpt_oss,
        to_gpt_oss,
        frozenset({"attention_bias", "sliding_window"}),
        (("num_experts", "num_local_experts"), ("experts_per_token", "num_experts_per_tok")),
    ),
}
