"""RoPE in config.json: the older format (rope_theta, rope_scaling) and the newer one (rope_parameters)."""

from typing import Any

from llmb.config.huggingface.hf_fields import HfConfig, check_supported, from_hf, to_hf
from llmb.config.serialization import convert
from llmb.config.spec import Model, RopeConfig
from llmb.errors import ConfigError, UnknownName

SCALED_ROPE_FIELDS = {"factor": "factor", "original_tokens": "original_max_position_embeddings"}
ROPE_FIELDS = {
    "linear": {"factor": "factor"},
    "llama3": SCALED_ROPE_FIELDS | {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": SCALED_ROPE_FIELDS
    | {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale_all_dim": "mscale_all_dim"},
}


def to_hf_rope(model: Model) -> HfConfig:
    """Return RoPE in the older format with two fields, which newer versions of `transformers` read too."""
    rope = model.rope or RopeConfig(theta=0.0)  # a model without RoPE is rejected when the config is read back
    scaling = None
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, **to_hf(rope, ROPE_FIELDS[rope.scaling])}
    if scaling and rope.scaling == "yarn":  # no factor on cosine and sine, expressed in two ways
        scaling |= {"attention_factor": 1.0, "mscale": rope.mscale_all_dim}
    max_positions = round(rope.original_tokens * rope.factor)
    config = {"rope_theta": rope.theta, "rope_scaling": scaling, "max_position_embeddings": max_positions}
    return config | ({"partial_rotary_factor": rope.partial_rotary_factor} if rope.partial_rotary_factor != 1.0 else {})


def from_hf_rope(config: HfConfig, layer_type: str = "") -> dict[str, Any]:
    """Read the older format (rope_theta, rope_scaling) or the newer one (rope_parameters).

    With a layer type, the part for it, where there is one.
    """
    fields: HfConfig = {"rope_theta": config.get("rope_theta") or 10_000.0}
    fields |= {name: config[name] for name in ("partial_rotary_factor",) if config.get(name) is not None}
    for section in ("rope_scaling", "rope_parameters"):
        values = convert(dict[str, Any], config.get(section) or {}, f"config.json.{section}")
        fields |= values[layer_type] or {} if layer_type in values else values
    if not layer_type:
        check_supported(fields, {"partial_rotary_factor": 1.0})
    partial = fields.get("partial_rotary_factor", 1.0)
    common = {"theta": fields["rope_theta"], **({"partial_rotary_factor": partial} if partial != 1.0 else {})}
    rope_type = str(fields.get("rope_type", fields.get("type", "default")))
    if rope_type == "default":
        return common
    scalings = ROPE_FIELDS.keys() if layer_type else {"yarn"}
    if rope_type not in scalings:
        raise UnknownName("rope_type of config.json:", rope_type, ("default", *sorted(scalings)))
    if rope_type == "yarn":
        fields = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, **fields}
        check_supported(fields, {"truncate": True})  # rounding of the bounds between scaled and unscaled pairs
        factor = fields.get("attention_factor")
        if factor not in (None, 1.0) or (factor is None and not fields["mscale"] == fields["mscale_all_dim"] != 0):
            raise ConfigError(
                "config.json: rope_type yarn with a factor on cosine and sine (mscale, attention_factor) "
                "is not supported"
            )
    return {**common, "scaling": rope_type, **from_hf(fields, ROPE_FIELDS[rope_type])}
