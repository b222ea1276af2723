"""RoPE in config.json: the older format (rope_theta, rope_scaling) and the newer one (rope_parameters)."""

import math
from collections.abc import Collection
from typing import Any

from llmb.config.huggingface.hf_fields import HfConfig, check_supported, from_hf, positive_int, required, to_hf
from llmb.config.model import Model, RopeConfig
from llmb.config.serialization import convert
from llmb.errors import ConfigError, UnknownName

SCALED_ROPE_FIELDS = {"factor": "factor", "original_tokens": "original_max_position_embeddings"}
# Our field -> field of config.json, by type of scaling.
ROPE_FIELDS = {
    "linear": {"factor": "factor"},
    "longrope": SCALED_ROPE_FIELDS
    | {"attention_factor": "attention_factor", "short_factors": "short_factor", "long_factors": "long_factor"},
    "llama3": SCALED_ROPE_FIELDS | {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": SCALED_ROPE_FIELDS
    | {name: name for name in ("beta_fast", "beta_slow", "truncate", "mscale_all_dim", "attention_factor")},
}


def to_hf_rope(model: Model) -> HfConfig:
    """Return RoPE in the older format with two fields, which newer versions of `transformers` read too."""
    rope = model.rope or RopeConfig(theta=0.0)  # a model without RoPE is rejected when the config is read back
    scaling = None
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, **to_hf(rope, ROPE_FIELDS[rope.scaling])}
        scaling |= {name: list(value) for name, value in scaling.items() if isinstance(value, tuple)}
    if scaling and rope.scaling == "yarn":
        scaling["mscale"] = rope.mscale_all_dim  # of an MLA no factor on cosine and sine, expressed in two ways
    max_positions = round(rope.original_tokens * rope.factor)
    config = {"rope_theta": rope.theta, "rope_scaling": scaling, "max_position_embeddings": max_positions}
    if rope.scaling == "longrope":
        config["original_max_position_embeddings"] = rope.original_tokens
    return config | ({"partial_rotary_factor": rope.partial_rotary_factor} if rope.partial_rotary_factor != 1.0 else {})


def to_hf_rope_sections(model: Model) -> HfConfig:
    """Return RoPE in the newer format, for layers without and with a sliding window."""
    full = model.rope or RopeConfig(theta=0.0)
    ropes = {"full_attention": full, "sliding_attention": model.local_rope or full}
    return {
        layer_type: {
            "rope_type": "default" if rope.scaling == "none" else rope.scaling,
            "rope_theta": rope.theta,
            **to_hf(rope, ROPE_FIELDS.get(rope.scaling, {})),
        }
        for layer_type, rope in ropes.items()
    }


def from_hf_rope(config: HfConfig, types: Collection[str], layer_type: str = "") -> dict[str, Any]:
    """Read the older format (rope_theta, rope_scaling) or the newer one (rope_parameters).

    `types`: of scaling, that the network has. `layer_type`: of a model whose layers have different RoPE.
    """
    section = _section_of_layers(config, layer_type) if layer_type else _section(config)
    fields: HfConfig = {"rope_theta": config.get("rope_theta") or 10_000.0}
    fields |= {name: config[name] for name in ("partial_rotary_factor",) if config.get(name) is not None}
    fields |= {name: value for name, value in section.items() if value is not None}
    partial = fields.get("partial_rotary_factor", 1.0)
    common = {"theta": fields["rope_theta"], **({"partial_rotary_factor": partial} if partial != 1.0 else {})}
    rope_type = str(fields.get("rope_type", fields.get("type", "default")))
    if rope_type == "default":
        return common
    if rope_type not in types:
        raise UnknownName("rope_type of config.json:", rope_type, ("default", *sorted(types)))
    if "original_tokens" in ROPE_FIELDS[rope_type]:
        fields["original_max_position_embeddings"] = _original_tokens(config, fields, layer_type)
    if rope_type in ("yarn", "longrope") and "factor" not in fields:
        original = positive_int(fields, "original_max_position_embeddings")
        fields["factor"] = positive_int(config, "max_position_embeddings") / original
    if rope_type == "yarn":
        fields = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, **fields}
        fields["truncate"] = bool(section.get("truncate", True))
        fields["attention_factor"] = _yarn_factor(fields)
    if rope_type == "longrope":
        fields["attention_factor"] = _longrope_factor(fields)
    return {**common, "scaling": rope_type, **from_hf(fields, ROPE_FIELDS[rope_type])}


def _section(config: HfConfig) -> HfConfig:
    """Return the section about all layers: rope_scaling, where a file has both."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    section = convert(dict[str, Any], config.get(name) or {}, f"config.json.{name}")
    for field, value in section.items():
        if isinstance(value, dict):
            raise ConfigError(f"config.json: {name}.{field} is not supported; this model has one RoPE in all layers")
    return section


def _section_of_layers(config: HfConfig, layer_type: str) -> HfConfig:
    """Return the section about one type of layer; rope_scaling is about layers without a sliding window."""
    scaling, parameters = (
        convert(dict[str, Any], config.get(name) or {}, f"config.json.{name}")
        for name in ("rope_scaling", "rope_parameters")
    )
    for field, value in parameters.items():
        if not isinstance(value, dict | None):
            raise ConfigError(f"config.json: rope_parameters.{field} is not supported; only sections by layer type are")
    if "type" in scaling and "rope_type" not in scaling:  # versions of `transformers` disagree about it here
        raise ConfigError("config.json: rope_scaling.type is not supported; only rope_type is")
    section = (parameters.get(layer_type) or {}) | (scaling if layer_type == "full_attention" else {})
    check_supported(section, {"truncate": True})  # `transformers` does not read it here
    return section


def _original_tokens(config: HfConfig, fields: HfConfig, layer_type: str) -> int:
    """Return the context before scaling: of the whole model, of the section, or as if it had not been extended."""
    name = "original_max_position_embeddings"
    if not layer_type and config.get(name) is not None:
        return positive_int(config, name)
    return positive_int(fields, name) if name in fields else positive_int(config, "max_position_embeddings")


def _yarn_factor(fields: HfConfig) -> float:
    """Return the factor on cosine and sine, which grows with the context unless two settings cancel it."""
    if fields.get("attention_factor") is not None:
        return convert(float, fields["attention_factor"], "config.json.rope_scaling.attention_factor")
    factor, mscale, all_dim = (
        convert(float, required(fields, name), f"config.json.rope_scaling.{name}")
        for name in ("factor", "mscale", "mscale_all_dim")
    )
    growth = math.log(factor) if factor > 1 else 0.0
    if mscale and all_dim:
        return (0.1 * mscale * growth + 1.0) / (0.1 * all_dim * growth + 1.0)
    return 0.1 * growth + 1.0


def _longrope_factor(fields: HfConfig) -> float:
    """Return the factor on cosine and sine, which grows with the context where config.json has none."""
    if fields.get("attention_factor") is not None:
        return convert(float, fields["attention_factor"], "config.json.rope_scaling.attention_factor")
    original, factor = positive_int(fields, "original_max_position_embeddings"), required(fields, "factor")
    factor = convert(float, factor, "config.json.rope_scaling.factor")
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
