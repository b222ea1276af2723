"""Conversion between a model.Model and Hugging Face's config.json.

    to_hf_config(model)                       # config.json from which `transformers` builds the same network
    load_hf_config(Path("Llama-3.1-8B"))      # model.Model of a downloaded folder

Nothing is dropped silently: a config.json with settings that no network here implements is rejected, and so is a
model.Model that config.json cannot express. Grok-1 has no class in `transformers` and therefore no config.json.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmb.config.huggingface.dense_models import DENSE_MODELS
from llmb.config.huggingface.hf_fields import (
    ACTIVATIONS,
    GROUPED_EXPERT_FIELDS,
    SIZE_FIELDS,
    HfConfig,
    check_quantization,
    check_routing,
    check_supported,
    from_hf,
    read_activation,
    required,
    to_hf,
)
from llmb.config.huggingface.hf_rope import from_hf_rope, to_hf_rope
from llmb.config.huggingface.llama_like import same_layers
from llmb.config.huggingface.mixtures import MIXTURES
from llmb.config.model import Model
from llmb.config.serialization import build, convert, read_json
from llmb.errors import ConfigError

# Our field -> field of config.json, by part of a model.
LAYER_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
MOE_FIELDS = GROUPED_EXPERT_FIELDS | {"score": "scoring_func"}
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
# Fields that only training has, which no network here computes.
TRAINING_VALUES: HfConfig = dict.fromkeys(
    ("attention_dropout", "hidden_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop", "router_jitter_noise"), 0.0
)
# Field of config.json -> the only supported value, which is also its default.
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
    "dual_chunk_attention_config": None,
    "compression_config": None,  # older name of quantization_config
    "per_layer_config": None,  # settings of single layers
    "partial_rotary_factor": 1.0,
    **TRAINING_VALUES,
    "mamba_hidden_act": "silu",
    "time_step_min": 0.001,
}
# Other model types of the same network, published with code of their own.
OTHER_TYPES = {"kimi_k2": "deepseek_v3"}
# Of a model with a vision tower the text model is read: its model_type by that of the whole.
TEXT_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# Other names that `transformers` reads -> field of config.json.
ALIASES: dict[str, dict[str, str]] = {
    **{model_type: mixture.aliases for model_type, mixture in MIXTURES.items()},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
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
    config = to_hf(model, SIZE_FIELDS) | {"attention_bias": False} | _WRITERS[model.architecture](model) | tokenizer_ids
    _check_lossless(model, from_hf_config(config))
    return config


def from_hf_config(config: HfConfig, name: str = "") -> Model:
    """Return the model of a config.json, or raise a ConfigError that names what is not supported."""
    model_type = convert(dict[str, Any], config, "config.json").get("model_type")
    if not isinstance(model_type, str) or model_type not in _CLASS_NAMES:
        choices = ", ".join(_CLASS_NAMES)  # without the nearest: a name that is alike is another network
        raise ConfigError(f"unknown model_type of config.json: {str(model_type)!r}; choices are: {choices}")
    formats = ("mxfp4",) if model_type == "gpt_oss" else ("fp8",)
    check_quantization(config, formats)
    _check_class(config, model_type)
    model_type = OTHER_TYPES.get(model_type, model_type)
    if model_type in TEXT_TYPES:
        config = convert(HfConfig, required(config, "text_config"), "config.json.text_config")
        model_type = TEXT_TYPES[model_type]
        check_supported(config, {"model_type": model_type})
        check_quantization(config, formats)
    config = _without_aliases(config, ALIASES.get(model_type, {}))
    likes = (*DENSE_MODELS.values(), *MIXTURES.values())
    read_fields = next((like.read_fields for like in likes if like.hf_type == model_type), set())
    check_supported(config, {field: value for field, value in SUPPORTED_VALUES.items() if field not in read_fields})
    fields = _READERS[model_type](_with_defaults(config, model_type))
    return build(Model, {"name": name or model_type, **fields}, "config.json")


def check_trainable(config: HfConfig) -> None:
    """Reject what a config.json asks of training alone: Seed-OSS is published with a dropout."""
    for field, supported in TRAINING_VALUES.items():
        if config.get(field) not in (None, supported):
            raise ConfigError(
                f"config.json: {field}={config[field]} is not computed in training; --task serve does not need it, and "
                f"a copy of config.json with {supported} trains without it"
            )


def load_hf_config(path: Path) -> Model:
    """Return the model of a folder in Hugging Face's layout, or of a config.json."""
    return from_hf_config(read_hf_config(path), model_name(path))


def read_hf_config(path: Path) -> HfConfig:
    """Return the config.json of a folder, or that file."""
    file = _config_file(path)
    if not file.is_file():
        if (file.parent / "adapter_config.json").is_file():
            raise ConfigError(f"{file.parent} is a LoRA adapter; name the folder of its base model")
        raise ConfigError(f"cannot read {file}: no such file")
    return convert(HfConfig, read_json(file), str(file))


def model_name(path: Path) -> str:
    """Return the name of the folder, or of a file that is not called config.json."""
    file = _config_file(path)
    return file.parent.name if file.name == "config.json" else file.stem


def stored_dtype(config: HfConfig) -> str | None:
    """Return the dtype of a folder's quantized weights, which is the name of the method; none: not quantized."""
    return (config.get("quantization_config") or {}).get("quant_method")


def _check_class(config: HfConfig, model_type: str) -> None:
    """Reject other networks of a model type: a classifier, a reward model, the draft of speculative decoding."""
    names = convert(tuple[str, ...] | None, config.get("architectures"), "config.json.architectures") or ()
    supported = _CLASS_NAMES[model_type]
    if names and _plain(supported) not in map(_plain, names):
        raise ConfigError(f"config.json: architectures={', '.join(names)} is not supported; only {supported} is")
    auto_map = convert(dict[str, Any] | None, config.get("auto_map"), "config.json.auto_map") or {}
    code = convert(str | None, auto_map.get("AutoModelForCausalLM"), "config.json.auto_map.AutoModelForCausalLM")
    if code is not None and _plain(code.rpartition(".")[2]) != _plain(supported):
        raise ConfigError(f"config.json: auto_map with the code of {code} is not supported; only {supported} is")


def _plain(class_name: str) -> str:
    """Return a class name as older files and newer ones agree on it: LLaMAForCausalLM, Ernie4_5_ForCausalLM."""
    return class_name.casefold().replace("_", "")


def _config_file(path: Path) -> Path:
    path = path.resolve()
    return path / "config.json" if path.is_dir() else path


def _with_defaults(config: HfConfig, model_type: str) -> HfConfig:
    """Return the fields with those of embeddings, which config.json leaves out where they have their default."""
    tied = any(
        like.defaults.get("tie_word_embeddings", False)
        for like in (*DENSE_MODELS.values(), *MIXTURES.values())
        if like.hf_type == model_type
    )
    return {"tie_word_embeddings": tied, **config}


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


def _to_deepseek(model: Model) -> HfConfig:
    return {
        "architectures": [_CLASS_NAMES["deepseek_v3"]],
        "model_type": "deepseek_v3",
        "hidden_act": ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_interleave": True,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **to_hf(model.mla, MLA_FIELDS),
        **to_hf(model.experts, MOE_FIELDS),
        **to_hf_rope(model),
    }


def _from_deepseek(config: HfConfig) -> dict[str, Any]:
    check_routing(config)
    return from_hf(config, SIZE_FIELDS) | {
        "architecture": "deepseek",
        "head_dim": required(config, "v_head_dim"),
        "activation": read_activation(config, "hidden_act"),
        "norm_eps": required(config, "rms_norm_eps"),
        "rope": _mla_rope(config),
        "experts": from_hf({"scoring_func": "sigmoid", **config}, MOE_FIELDS),
        "mla": from_hf(config, MLA_FIELDS),
    }


def _mla_rope(config: HfConfig) -> dict[str, Any]:
    """Read RoPE, or YaRN without a factor on cosine and sine."""
    rope = from_hf_rope(config, ("yarn",))
    if rope.pop("attention_factor", 1.0) != 1.0:
        raise ConfigError(
            "config.json: rope_type yarn with a factor on cosine and sine (mscale, attention_factor) is not supported "
            "in a deepseek_v3"
        )
    check_supported(rope, {"truncate": True, "partial_rotary_factor": 1.0})
    return rope


def _to_nemotron_h(model: Model) -> HfConfig:
    return {
        "architectures": [_CLASS_NAMES["nemotron_h"]],
        "model_type": "nemotron_h",
        "head_dim": model.head_dim,
        "mlp_hidden_act": ACTIVATIONS[model.activation],
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": model.norm_eps,
        "hybrid_override_pattern": model.pattern,
        **to_hf(model.mamba, MAMBA_FIELDS),
    }


def _from_nemotron_h(config: HfConfig) -> dict[str, Any]:
    pattern = _pattern(config)
    check_supported(config, {"tie_word_embeddings": False})
    return from_hf({**config, "num_hidden_layers": len(pattern)}, SIZE_FIELDS) | {
        "architecture": "nemotron_h",
        "pattern": pattern,
        "gated": False,
        "head_dim": config.get("head_dim") or required(config, "attention_head_dim"),
        "activation": read_activation(config, "mlp_hidden_act"),
        "norm_eps": required(config, "layer_norm_epsilon"),
        "rope": None,
        "mamba": from_hf(config, MAMBA_FIELDS),
    }


_WRITERS: dict[str, Callable[[Model], HfConfig]] = {
    **{architecture: dense.write for architecture, dense in DENSE_MODELS.items()},
    **{architecture: mixture.write for architecture, mixture in MIXTURES.items()},
    "deepseek": _to_deepseek,
    "nemotron_h": _to_nemotron_h,
}
HF_ARCHITECTURES = tuple(_WRITERS)  # architectures that `transformers` has
_READERS: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    **{dense.hf_type: dense.read for dense in DENSE_MODELS.values()},
    **{architecture: mixture.read for architecture, mixture in MIXTURES.items()},
    "deepseek_v3": _from_deepseek,
    "nemotron_h": _from_nemotron_h,
}
# Network of `transformers` by model_type; the only one that is computed here.
_CLASS_NAMES = {
    **{dense.hf_type: dense.class_name for dense in DENSE_MODELS.values()},
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    **{model_type: mixture.class_name for model_type, mixture in MIXTURES.items()},
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), "DeepseekV3ForCausalLM"),
    "nemotron_h": "NemotronHForCausalLM",
}


def _pattern(config: HfConfig) -> str:
    """Return one letter per layer, from hybrid_override_pattern or, in newer files, layers_block_type."""
    older, newer = "hybrid_override_pattern", "layers_block_type"
    letters = convert(str | None, config.get(older), f"config.json.{older}")
    if letters is not None:
        _check_layers(older, letters, LAYER_LETTERS.values())
    if letters is None or config.get(newer) is not None:
        block_types = convert(tuple[str, ...], required(config, newer), f"config.json.{newer}")
        _check_layers(newer, block_types, LAYER_LETTERS)
        listed = "".join(LAYER_LETTERS[block_type] for block_type in block_types)
        if letters not in (None, listed):
            raise ConfigError(f"config.json: {older}={letters} and {newer}={listed} disagree")
        letters = listed
    return letters


def _check_layers(field: str, layers: Iterable[str], supported: Collection[str]) -> None:
    if unknown := sorted(set(layers) - set(supported)):
        choices = ", ".join(dict.fromkeys(supported))
        raise ConfigError(f"config.json: {field} with {', '.join(unknown)} is not supported; only {choices} are")


def _check_lossless(model: Model, restored: Model) -> None:
    """Raise a ConfigError if a model read back from config.json differs, except in what changes no logits."""
    restored = replace(restored, name=model.name)
    if model.mla is not None:
        restored = replace(restored, head_dim=model.head_dim)  # MLA has its own head dims
    if restored.experts is not None and model.experts is not None:
        restored = replace(restored, experts=replace(restored.experts, aux_loss=model.experts.aux_loss))
    if restored.rope is not None and model.rope is not None and model.rope.scaling == "none":
        partial = restored.rope.partial_rotary_factor
        restored = replace(restored, rope=replace(model.rope, theta=restored.rope.theta, partial_rotary_factor=partial))
    original, read_back = asdict(model), asdict(same_layers(model, restored))
    lost = [f"{field}={original[field]}" for field in original if original[field] != read_back[field]]
    if lost:
        raise ConfigError(f"model {model.name}: config.json of a {model.architecture} cannot express {', '.join(lost)}")
