"""A model in the words of Hugging Face's config.json, from a spec.Model and back.

    to_config(model)                    # what `transformers` builds the same network from
    model_in(Path("Llama-3.1-8B"))      # the spec.Model of a downloaded folder

Nothing is lost on the way in silence: what a config.json asks for and no network here computes is refused, and so is a
spec.Model that config.json cannot tell in full. Grok-1 has no class in `transformers`, so there is none for it.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmb.config.serialization import build, convert, read_json
from llmb.config.spec import Model, Rope
from llmb.errors import ConfigError, UnknownName

Config = dict[str, Any]

ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "squared_relu": "relu2"}
LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
# Our field -> theirs: of every model, then of its parts.
SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "tied_embeddings": "tie_word_embeddings",
}
EXPERTS = {
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
LATENT = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
MAMBA = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "chunk": "chunk_size",
    "conv": "conv_kernel",
}
STRETCHED = {"factor": "factor", "original_tokens": "original_max_position_embeddings"}
ROPES = {
    "llama3": STRETCHED | {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": STRETCHED | {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale_all_dim": "mscale_all_dim"},
}
# Their field -> the one value that the networks here compute, which it also has where it is absent.
FIXED: Config = {
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
}


def to_config(model: Model) -> Config:
    """The config.json of a model, or a ConfigError that names what config.json has no word for."""
    if model.architecture not in _WRITERS:
        raise ConfigError(f"{model.architecture} has no config.json; those which have: {', '.join(_WRITERS)}")
    of_a_tokenizer = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = _told(model, SIZES) | {"attention_bias": False} | _WRITERS[model.architecture](model) | of_a_tokenizer
    _check_whole(model, from_config(config))
    return config


def from_config(config: Config, name: str = "") -> Model:
    """The model that a config.json describes, or a ConfigError that names what is not built."""
    kind = convert(dict[str, Any], config, "config.json").get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise UnknownName("model_type of config.json:", kind, _READERS)
    for field, built in FIXED.items():
        if config.get(field, built) != built:
            raise ConfigError(f"config.json: {field}={config[field]} is not built; only {built} is")
    told = _READERS[kind]({"tie_word_embeddings": False, **config})
    return build(Model, {"name": name or kind, **told}, "config.json")


def model_in(folder: Path) -> Model:
    """The model of a folder in Hugging Face's layout."""
    return from_config(read_json(folder / "config.json"), folder.resolve().name)


def _llama(model: Model) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": model.head_dim,
        "hidden_act": ACTIVATIONS[model.activation],
        "mlp_bias": False,
        "rms_norm_eps": model.norm_eps,
        **_rope(model),
    }


def _from_llama(config: Config) -> dict[str, Any]:
    return _read(config, SIZES) | {
        "architecture": "llama",
        "head_dim": config.get("head_dim") or _whole(config, "hidden_size") // _whole(config, "num_attention_heads"),
        "activation": _activation(config, "hidden_act"),
        "norm_eps": _needed(config, "rms_norm_eps"),
        "rope": _from_rope(config),
    }


def _deepseek(model: Model) -> Config:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_interleave": True,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **_told(model.latent, LATENT),
        **_told(model.experts, EXPERTS),
        **_rope(model),
    }


def _from_deepseek(config: Config) -> dict[str, Any]:
    return _read(config, SIZES) | {
        "architecture": "deepseek",
        "head_dim": _needed(config, "v_head_dim"),
        "activation": _activation(config, "hidden_act"),
        "norm_eps": _needed(config, "rms_norm_eps"),
        "rope": _from_rope(config),
        "experts": _read({"scoring_func": "sigmoid", **config}, EXPERTS),
        "latent": _read(config, LATENT),
    }


def _nemotron_h(model: Model) -> Config:
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
        **_told(model.mamba, MAMBA),
    }


def _from_nemotron_h(config: Config) -> dict[str, Any]:
    pattern = _pattern(config)
    return _read({**config, "num_hidden_layers": len(pattern)}, SIZES) | {
        "architecture": "nemotron_h",
        "pattern": pattern,
        "gated": False,
        "head_dim": config.get("head_dim") or _needed(config, "attention_head_dim"),
        "activation": _activation(config, "mlp_hidden_act"),
        "norm_eps": _needed(config, "layer_norm_epsilon"),
        "rope": None,
        "mamba": _read(config, MAMBA),
    }


_WRITERS: dict[str, Callable[[Model], Config]] = {
    "llama": _llama,
    "deepseek": _deepseek,
    "nemotron_h": _nemotron_h,
}
CONFIGURED = tuple(_WRITERS)  # architectures that `transformers` has, and so a config.json
_READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _from_llama,
    "deepseek_v3": _from_deepseek,
    "nemotron_h": _from_nemotron_h,
}


def _rope(model: Model) -> Config:
    """In the older form, two fields, which newer versions of `transformers` read too."""
    rope = model.rope or Rope(theta=0.0)  # a model without positions is found out when the config is read back
    scaling = None
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, **_told(rope, ROPES[rope.scaling])}
    if scaling and rope.scaling == "yarn":  # none of it goes into cosine and sine, said in two ways
        scaling |= {"attention_factor": 1.0, "mscale": rope.mscale_all_dim}
    longest = round(rope.original_tokens * rope.factor)
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "max_position_embeddings": longest}


def _from_rope(config: Config) -> dict[str, Any]:
    """Of the older form (rope_theta, rope_scaling) or the newer (rope_parameters)."""
    told: Config = {"rope_theta": config.get("rope_theta", 10_000.0)}
    for form in ("rope_scaling", "rope_parameters"):
        told |= convert(dict[str, Any], config.get(form) or {}, f"config.json.{form}")
    kind = str(told.get("rope_type", told.get("type", "default")))
    if kind == "default":
        return {"theta": told["rope_theta"]}
    if kind not in ROPES:
        raise UnknownName("rope_type of config.json:", kind, ("default", *ROPES))
    if kind == "yarn":
        told = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, **told}
        if told.get("attention_factor") != 1.0 and not told["mscale"] == told["mscale_all_dim"] != 0:
            raise ConfigError("config.json: yarn with a factor on cosine and sine (mscale) is not built")
    return {"theta": told["rope_theta"], "scaling": kind, **_read(told, ROPES[kind])}


def _pattern(config: Config) -> str:
    """One letter a layer, from the letters of older files or the words of newer ones."""
    if config.get("hybrid_override_pattern") is not None:
        letters = convert(str, config["hybrid_override_pattern"], "config.json.hybrid_override_pattern")
    else:
        words = convert(tuple[str, ...], _needed(config, "layers_block_type"), "config.json.layers_block_type")
        letters = "".join(LETTERS.get(word, word) for word in words)
    if set(letters) - set(LETTERS.values()):
        raise ConfigError(f"config.json: layers {letters} are not built; those which are: {' '.join(LETTERS)}")
    return letters


def _activation(config: Config, field: str) -> str:
    by_their_name = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    theirs = str(config.get(field))
    if theirs not in by_their_name:
        raise UnknownName(f"{field} of config.json:", theirs, by_their_name)
    return by_their_name[theirs]


def _told(part: object, words: dict[str, str]) -> Config:
    """A part of the model in their words; a part that is not there has none, which is found when it is read back."""
    return {theirs: getattr(part, ours, None) for ours, theirs in words.items()}


def _read(config: Config, words: dict[str, str]) -> dict[str, Any]:
    return {ours: _needed(config, theirs) for ours, theirs in words.items()}


def _needed(config: Config, field: str) -> Any:
    if config.get(field) is None:
        raise ConfigError(f"config.json: field {field!r} is missing")
    return config[field]


def _whole(config: Config, field: str) -> int:
    """A number to count by: whole and more than nothing."""
    number = convert(int, _needed(config, field), f"config.json.{field}")
    if number < 1:
        raise ConfigError(f"config.json.{field}: {number} must be at least 1")
    return number


def _check_whole(model: Model, told: Model) -> None:
    """What config.json says of a model is all of it. Left aside: what changes no logits."""
    told = replace(told, name=model.name)
    if model.latent is not None:
        told = replace(told, head_dim=model.head_dim)  # the latent's own widths count
    if told.experts is not None and model.experts is not None:
        told = replace(told, experts=replace(told.experts, aux_loss=model.experts.aux_loss))
    if told.rope is not None and model.rope is not None and model.rope.scaling == "none":
        told = replace(told, rope=replace(model.rope, theta=told.rope.theta))
    ours, theirs = asdict(model), asdict(told)
    lost = [f"{field}={ours[field]}" for field in ours if ours[field] != theirs[field]]
    if lost:
        raise ConfigError(f"model {model.name}: config.json of a {model.architecture} cannot say {', '.join(lost)}")
