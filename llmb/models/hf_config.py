"""Conversion between a spec.Model and Hugging Face's config.json.

    to_hf_config(model)                       # config.json from which `transformers` builds the same network
    load_hf_config(Path("Llama-3.1-8B"))      # spec.Model of a downloaded folder

Nothing is dropped silently: a config.json with settings that no network here implements is rejected, and so is a
spec.Model that config.json cannot express. Grok-1 has no class in `transformers` and therefore no config.json.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmb.config.serialization import build, convert, read_json
from llmb.config.spec import Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError, UnknownName

HfConfig = dict[str, Any]

ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "squared_relu": "relu2"}
LAYER_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
# Our field -> field of config.json: of every model, then of its parts.
SIZE_FIELDS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "tied_embeddings": "tie_word_embeddings",
}
MOE_FIELDS = {
    "count": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "groups": "n_group",
    "top_groups": "topk_group",
    "score": "scoring_func",
    "renormalise": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
MLA_FIELDS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
MAMBA_FIELDS = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "chunk": "chunk_size",
    "conv": "conv_kernel",
}
SCALED_ROPE_FIELDS = {"factor": "factor", "original_tokens": "original_max_position_embeddings"}
ROPE_FIELDS = {
    "llama3": SCALED_ROPE_FIELDS | {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": SCALED_ROPE_FIELDS
    | {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale_all_dim": "mscale_all_dim"},
}
# Field of config.json -> the only supported value, which is also its default.
YARN_FIELDS = SCALED_ROPE_FIELDS | {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
# What `transformers` takes for a gpt-oss whose config.json has no RoPE scaling: that of the published models.
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
LAYER_TYPES = {"F": "full_attention", "S": "sliding_attention"}  # by letter of an attention pattern
# Fields that a model type reads itself, with other values than these.
OWN_FIELDS = {"gpt_oss": ("attention_bias", "sliding_window", "quantization_config")}
SUPPORTED_VALUES: HfConfig = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "sliding_window": None,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "mamba_hidden_act": "silu",
    "time_step_min": 0.001,
}
# Other names that `transformers` reads -> field of config.json.
ALIASES: dict[str, dict[str, str]] = {
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    "nemotron_h": {
        "layer_types": "layers_block_type",
        "mamba_chunk_size": "chunk_size",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_n_groups": "n_groups",
    },
}


def to_hf_config(model: Model) -> HfConfig:
    """Return the config.json of a model, or raise a ConfigError that names what it cannot express."""
    if model.architecture not in _WRITERS:
        raise ConfigError(f"{model.architecture} has no config.json; architectures with one: {', '.join(_WRITERS)}")
    tokenizer_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = (
        _to_hf(model, SIZE_FIELDS) | {"attention_bias": False} | _WRITERS[model.architecture](model) | tokenizer_ids
    )
    _check_lossless(model, from_hf_config(config))
    return config


def from_hf_config(config: HfConfig, name: str = "") -> Model:
    """Return the model of a config.json, or raise a ConfigError that names what is not supported."""
    model_type = convert(dict[str, Any], config, "config.json").get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise UnknownName("model_type of config.json:", model_type, _READERS)
    config = _without_aliases(config, ALIASES.get(model_type, {}))
    own = OWN_FIELDS.get(model_type, ())
    _check_supported(config, {field: value for field, value in SUPPORTED_VALUES.items() if field not in own})
    fields = _READERS[model_type]({"tie_word_embeddings": False, **config})
    return build(Model, {"name": name or model_type, **fields}, "config.json")


def load_hf_config(folder: Path) -> Model:
    """Return the model of a folder in Hugging Face's layout."""
    return from_hf_config(read_json(folder / "config.json"), folder.resolve().name)


def _without_aliases(config: HfConfig, aliases: dict[str, str]) -> HfConfig:
    """Return the fields under one name each; two names that disagree are rejected."""
    renamed = dict(config)
    for alias, field in aliases.items():
        value = renamed.pop(alias, None)
        if value is None:
            continue
        if renamed.get(field, value) != value:
            raise ConfigError(f"config.json: {alias}={value} and {field}={renamed[field]} are the same and disagree")
        if value != SUPPORTED_VALUES.get(field, value):
            raise ConfigError(f"config.json: {alias}={value} is not supported; only {SUPPORTED_VALUES[field]} is")
        renamed[field] = value
    return renamed


def _check_supported(config: HfConfig, values: HfConfig) -> None:
    """Reject the first field whose value is not the supported one."""
    for field, supported in values.items():
        if config.get(field, supported) != supported:
            raise ConfigError(f"config.json: {field}={config[field]} is not supported; only {supported} is")


def _to_llama(model: Model) -> HfConfig:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": model.head_dim,
        "hidden_act": ACTIVATIONS.get(model.activation),
        "mlp_bias": False,
        "rms_norm_eps": model.norm_eps,
        **_to_hf_rope(model),
    }


def _from_llama(config: HfConfig) -> dict[str, Any]:
    return _from_hf(config, SIZE_FIELDS) | {
        "architecture": "llama",
        "head_dim": config.get("head_dim")
        or _positive_int(config, "hidden_size") // _positive_int(config, "num_attention_heads"),
        "activation": _activation(config, "hidden_act"),
        "norm_eps": _required(config, "rms_norm_eps"),
        "rope": _from_hf_rope(config),
    }


def _to_deepseek(model: Model) -> HfConfig:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_interleave": True,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **_to_hf(model.mla, MLA_FIELDS),
        **_to_hf(model.experts, MOE_FIELDS),
        **_to_hf_rope(model),
    }


def _from_deepseek(config: HfConfig) -> dict[str, Any]:
    _check_routing(config)
    return _from_hf(config, SIZE_FIELDS) | {
        "architecture": "deepseek",
        "head_dim": _required(config, "v_head_dim"),
        "activation": _activation(config, "hidden_act"),
        "norm_eps": _required(config, "rms_norm_eps"),
        "rope": _from_hf_rope(config),
        "experts": _from_hf({"scoring_func": "sigmoid", **config}, MOE_FIELDS),
        "mla": _from_hf(config, MLA_FIELDS),
    }


def _to_mixtral(model: Model) -> HfConfig:
    experts = _experts(model)
    return _to_llama(model) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": experts.ffn,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
    }


def _from_mixtral(config: HfConfig) -> dict[str, Any]:
    return _from_llama(config) | {
        "architecture": "mixtral",
        "experts": {
            "count": _required(config, "num_local_experts"),
            "top_k": _required(config, "num_experts_per_tok"),
            "ffn": _required(config, "intermediate_size"),
        },
    }


def _to_qwen3_moe(model: Model) -> HfConfig:
    experts = _experts(model)
    return _to_llama(model) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _from_qwen3_moe(config: HfConfig) -> dict[str, Any]:
    _check_supported(config, {"decoder_sparse_step": 1, "use_sliding_window": False})
    if config.get("mlp_only_layers"):
        raise ConfigError(f"config.json: mlp_only_layers={config['mlp_only_layers']} is not supported; only [] is")
    return _from_llama(config) | {
        "architecture": "qwen3_moe",
        "qk_norm": "head",
        "experts": {
            "count": _required(config, "num_experts"),
            "top_k": _required(config, "num_experts_per_tok"),
            "ffn": _required(config, "moe_intermediate_size"),
            "renormalise": config.get("norm_topk_prob", False),
        },
    }


def _to_gpt_oss(model: Model) -> HfConfig:
    experts, rope, windowed = _experts(model), model.rope or RopeConfig(theta=0.0), "S" in model.attention_pattern
    scaling = {"rope_type": "yarn", "truncate": rope.truncate, **_to_hf(rope, YARN_FIELDS)}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": model.head_dim,
        "intermediate_size": experts.ffn,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": model.qkv_bias,
        "sliding_window": model.window if windowed else None,
        "layer_types": [LAYER_TYPES.get(model.attention_kind(layer)) for layer in range(model.layers)],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling if rope.scaling == "yarn" else {"rope_type": "default"},  # none would mean GPT_OSS_YARN
        "max_position_embeddings": round(rope.original_tokens * rope.factor),
    }


def _from_gpt_oss(config: HfConfig) -> dict[str, Any]:
    _check_supported(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"})
    _check_supported(config.get("quantization_config") or {}, {"quant_method": "mxfp4"})
    head_dim = config.get("head_dim") or _positive_int(config, "hidden_size") // _positive_int(
        config, "num_attention_heads"
    )
    rope, factor = _yarn(config)
    pattern = _attention_pattern(config)
    return _from_hf(config, SIZE_FIELDS) | {
        "architecture": "gpt_oss",
        "head_dim": head_dim,
        "activation": "swigluoai",
        "norm_eps": _required(config, "rms_norm_eps"),
        "qkv_bias": config.get("attention_bias", True),
        "o_bias": config.get("attention_bias", True),
        "attention_sinks": True,
        "attention_pattern": pattern,
        "window": _required(config, "sliding_window") if "S" in pattern else None,
        "attention_scale": None if factor == 1.0 else head_dim**-0.5 * factor**2,
        "rope": rope,
        "experts": {
            "count": _required(config, "num_local_experts"),
            "top_k": _required(config, "num_experts_per_tok"),
            "ffn": _required(config, "intermediate_size"),
            "bias": True,
        },
    }


def _yarn(config: HfConfig) -> tuple[dict[str, Any], float]:
    """Read YaRN, or RoPE without scaling, and return its factor on cosine and sine beside it."""
    fields: HfConfig = {"rope_theta": config.get("rope_theta", 150_000.0), "truncate": True}
    sections = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    for name, section in (sections or {"rope_parameters": GPT_OSS_YARN}).items():
        fields |= convert(dict[str, Any], section, f"config.json.{name}")
    rope_type = str(fields.get("rope_type", "default"))
    if rope_type == "default":
        return {"theta": fields["rope_theta"]}, 1.0
    if rope_type != "yarn":
        raise UnknownName("rope_type of config.json:", rope_type, ("default", "yarn"))
    _check_supported(fields, dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim")))
    fields = {"beta_fast": 32.0, "beta_slow": 1.0, **fields}
    rope = {"theta": fields["rope_theta"], "scaling": "yarn", "truncate": fields["truncate"]}
    factor = convert(float, _required(fields, "factor"), "config.json.rope_parameters.factor")
    return rope | _from_hf(fields, YARN_FIELDS), 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _attention_pattern(config: HfConfig) -> str:
    """Return the letters of layer_types, as short as they repeat; gpt-oss begins with a sliding window."""
    layers = _positive_int(config, "num_hidden_layers")
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * layers
    by_type = {hf_name: letter for letter, hf_name in LAYER_TYPES.items()}
    unknown = sorted(set(map(str, kinds)) - set(by_type))
    if unknown:
        raise UnknownName("layer_types of config.json:", unknown[0], by_type)
    letters = "".join(by_type[kind] for kind in kinds)[:layers]
    return next(letters[:n] for n in range(1, layers + 1) if (letters[:n] * layers)[:layers] == letters)


def _experts(model: Model) -> MoEConfig:
    if model.experts is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field experts")
    return model.experts


def _check_routing(config: HfConfig) -> None:
    """Reject group-limited routing that leaves a token fewer experts than it is routed to."""
    names = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    count, groups, top_groups, top_k = (_positive_int(config, name) for name in names)
    if top_k > count // groups * top_groups:
        raise ConfigError(
            f"config.json: num_experts_per_tok={top_k} is more than the {count // groups * top_groups} experts in "
            f"topk_group={top_groups} of n_group={groups} groups"
        )


def _to_nemotron_h(model: Model) -> HfConfig:
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "head_dim": model.head_dim,
        "mlp_hidden_act": ACTIVATIONS[model.activation],
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": model.norm_eps,
        "hybrid_override_pattern": model.pattern,
        **_to_hf(model.mamba, MAMBA_FIELDS),
    }


def _from_nemotron_h(config: HfConfig) -> dict[str, Any]:
    pattern = _pattern(config)
    _check_supported(config, {"tie_word_embeddings": False})
    return _from_hf({**config, "num_hidden_layers": len(pattern)}, SIZE_FIELDS) | {
        "architecture": "nemotron_h",
        "pattern": pattern,
        "gated": False,
        "head_dim": config.get("head_dim") or _required(config, "attention_head_dim"),
        "activation": _activation(config, "mlp_hidden_act"),
        "norm_eps": _required(config, "layer_norm_epsilon"),
        "rope": None,
        "mamba": _from_hf(config, MAMBA_FIELDS),
    }


_WRITERS: dict[str, Callable[[Model], HfConfig]] = {
    "llama": _to_llama,
    "deepseek": _to_deepseek,
    "nemotron_h": _to_nemotron_h,
    "mixtral": _to_mixtral,
    "qwen3_moe": _to_qwen3_moe,
    "gpt_oss": _to_gpt_oss,
}
HF_ARCHITECTURES = tuple(_WRITERS)  # architectures that `transformers` has
_READERS: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "llama": _from_llama,
    "deepseek_v3": _from_deepseek,
    "nemotron_h": _from_nemotron_h,
    "mixtral": _from_mixtral,
    "qwen3_moe": _from_qwen3_moe,
    "gpt_oss": _from_gpt_oss,
}


def _to_hf_rope(model: Model) -> HfConfig:
    """Return RoPE in the older format with two fields, which newer versions of `transformers` read too."""
    rope = model.rope or RopeConfig(theta=0.0)  # a model without RoPE is rejected when the config is read back
    scaling = None
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, **_to_hf(rope, ROPE_FIELDS[rope.scaling])}
    if scaling and rope.scaling == "yarn":  # no factor on cosine and sine, expressed in two ways
        scaling |= {"attention_factor": 1.0, "mscale": rope.mscale_all_dim}
    max_positions = round(rope.original_tokens * rope.factor)
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "max_position_embeddings": max_positions}


def _from_hf_rope(config: HfConfig) -> dict[str, Any]:
    """Read the older format (rope_theta, rope_scaling) or the newer one (rope_parameters)."""
    fields: HfConfig = {"rope_theta": config.get("rope_theta", 10_000.0)}
    for section in ("rope_scaling", "rope_parameters"):
        fields |= convert(dict[str, Any], config.get(section) or {}, f"config.json.{section}")
    _check_supported(fields, {"partial_rotary_factor": 1.0})
    rope_type = str(fields.get("rope_type", fields.get("type", "default")))
    if rope_type == "default":
        return {"theta": fields["rope_theta"]}
    if rope_type not in ROPE_FIELDS:
        raise UnknownName("rope_type of config.json:", rope_type, ("default", *ROPE_FIELDS))
    if rope_type == "yarn":
        fields = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, **fields}
        _check_supported(fields, {"truncate": True})  # rounding of the bounds between scaled and unscaled pairs
        factor = fields.get("attention_factor")
        if factor not in (None, 1.0) or (factor is None and not fields["mscale"] == fields["mscale_all_dim"] != 0):
            raise ConfigError(
                "config.json: yarn with a factor on cosine and sine (mscale, attention_factor) is not supported"
            )
    return {"theta": fields["rope_theta"], "scaling": rope_type, **_from_hf(fields, ROPE_FIELDS[rope_type])}


def _pattern(config: HfConfig) -> str:
    """Return one letter per layer, from hybrid_override_pattern or, in newer files, layers_block_type."""
    letters = convert(str | None, config.get("hybrid_override_pattern"), "config.json.hybrid_override_pattern")
    if letters is None or config.get("layers_block_type") is not None:
        block_types = convert(tuple[str, ...], _required(config, "layers_block_type"), "config.json.layers_block_type")
        listed = "".join(LAYER_LETTERS.get(block_type, block_type) for block_type in block_types)
        if letters not in (None, listed):
            raise ConfigError(f"config.json: hybrid_override_pattern={letters} and layers_block_type={listed} disagree")
        letters = listed
    if set(letters) - set(LAYER_LETTERS.values()):
        raise ConfigError(f"config.json: layers {letters} are not supported; choices are: {' '.join(LAYER_LETTERS)}")
    return letters


def _activation(config: HfConfig, field: str) -> str:
    by_hf_name = {hf_name: name for name, hf_name in ACTIVATIONS.items()}
    hf_name = str(config.get(field))
    if hf_name not in by_hf_name:
        raise UnknownName(f"{field} of config.json:", hf_name, by_hf_name)
    return by_hf_name[hf_name]


def _to_hf(settings: object, names: dict[str, str]) -> HfConfig:
    """Return settings under the names of config.json; missing ones are found when it is read back."""
    return {hf_name: getattr(settings, name, None) for name, hf_name in names.items()}


def _from_hf(config: HfConfig, names: dict[str, str]) -> dict[str, Any]:
    return {name: _required(config, hf_name) for name, hf_name in names.items()}


def _required(config: HfConfig, field: str) -> Any:
    if config.get(field) is None:
        raise ConfigError(f"config.json: field {field!r} is missing")
    return config[field]


def _positive_int(config: HfConfig, field: str) -> int:
    """Return a field that must be a positive integer."""
    number = convert(int, _required(config, field), f"config.json.{field}")
    if number < 1:
        raise ConfigError(f"config.json.{field}: {number} must be at least 1")
    return number


def _check_lossless(model: Model, restored: Model) -> None:
    """Raise a ConfigError if a model read back from config.json differs, except in what changes no logits."""
    restored = replace(restored, name=model.name)
    if model.mla is not None:
        restored = replace(restored, head_dim=model.head_dim)  # MLA has its own head dims
    if restored.experts is not None and model.experts is not None:
        restored = replace(restored, experts=replace(restored.experts, aux_loss=model.experts.aux_loss))
    if restored.rope is not None and model.rope is not None and model.rope.scaling == "none":
        restored = replace(restored, rope=replace(model.rope, theta=restored.rope.theta))
    original, read_back = asdict(model), asdict(restored)
    lost = [f"{field}={original[field]}" for field in original if original[field] != read_back[field]]
    if lost:
        raise ConfigError(f"model {model.name}: config.json of a {model.architecture} cannot express {', '.join(lost)}")
