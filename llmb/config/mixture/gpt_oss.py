"""gpt-oss: experts with biases and a clamped SwiGLU, sliding windows in every other layer, attention sinks, YaRN.

The factor of YaRN on cosine and sine is `attention_scale` here: squared, as it is on queries and keys.
"""

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
from llmb.config.huggingface.llama_like import LAYER_TYPES, LLAMA_NAMES, read_layer_types, shortest_period
from llmb.config.huggingface.mixture_like import MixtureLike, experts_of
from llmb.config.model import Model, RopeConfig

YARN_FIELDS = SCALED_ROPE_FIELDS | {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
# What `transformers` takes for a gpt-oss whose config.json has no RoPE scaling: that of the published models.
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


class GptOss(MixtureLike):
    """gpt-oss, which has defaults and a RoPE of its own."""

    def read(self, config: HfConfig) -> dict[str, Any]:
        """Return the fields of model.Model, or raise a ConfigError that names what is not supported."""
        check_supported(config, self.refused)
        head_dim = head_dim_of({"head_dim": 64} | config)
        rope, factor = _yarn(config)
        layers = positive_int(config, "num_hidden_layers")
        alternating = (["sliding_attention", "full_attention"] * layers)[:layers]
        layer_types = config.get("layer_types") or alternating
        pattern = shortest_period(read_layer_types({"layer_types": layer_types}, layers))
        return from_hf(config, SIZE_FIELDS) | self.fields | {
            "architecture": self.architecture,
            "head_dim": head_dim,
            "norm_eps": required(config, "rms_norm_eps"),
            "qkv_bias": config.get("attention_bias", True),
            "o_bias": config.get("attention_bias", True),
            "attention_pattern": pattern,
            "window": required(config, "sliding_window") if "S" in pattern else None,
            "attention_scale": None if factor == 1.0 else head_dim**-0.5 * factor**2,
            "rope": rope,
            "experts": from_hf(config, self.expert_fields) | self.experts,
        }  # fmt: skip

    def write(self, model: Model) -> HfConfig:
        """Return the config.json of a model; what it cannot express is found when it is read back."""
        rope, windowed = model.rope or RopeConfig(theta=0.0), "S" in model.attention_pattern
        by_letter = {letter: name for name, letter in LAYER_TYPES.items()}
        scaling = {"rope_type": "yarn", "truncate": rope.truncate, **to_hf(rope, YARN_FIELDS)}
        return {
            "architectures": [self.class_name],
            "model_type": self.hf_type,
            **to_hf(experts_of(model), self.expert_fields),
            **self.refused,
            "head_dim": model.head_dim,
            "attention_bias": model.qkv_bias,
            "sliding_window": model.window if windowed else None,
            "layer_types": [by_letter.get(model.attention_kind(layer)) for layer in range(model.layers)],
            "rms_norm_eps": model.norm_eps,
            "rope_theta": rope.theta,
            # None would mean GPT_OSS_YARN.
            "rope_scaling": scaling if rope.scaling == "yarn" else {"rope_type": "default"},
            "max_position_embeddings": round(rope.original_tokens * rope.factor),
        }

    @property
    def attention_fields(self) -> set[str]:
        """Fields of model.Model about attention and its norms that these models may have other than Llama."""
        return super().attention_fields | {"attention_scale"}


def _yarn(config: HfConfig) -> tuple[dict[str, Any], float]:
    """Read YaRN, or RoPE without scaling, and return its factor on cosine and sine beside it."""
    if not config.get("rope_scaling") and config.get("rope_parameters") is None:
        config = config | {"rope_parameters": GPT_OSS_YARN}
    section = config.get("rope_scaling") or config["rope_parameters"]
    rope = from_hf_rope({"rope_theta": 150_000.0, **config}, ("yarn",))
    check_supported(section, dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim")))
    check_supported(rope, {"partial_rotary_factor": 1.0})
    return rope, rope.pop("attention_factor", 1.0)


GPT_OSS = GptOss(
    architecture="gpt_oss",
    class_name="GptOssForCausalLM",
    fields={"activation": "swigluoai", "attention_sinks": True},
    bias_fields=("attention_bias", "attention_bias"),
    layers_by="layer_types",
    refused={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"},
    expert_fields={"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
    experts={"bias": True},
    names=LLAMA_NAMES | {"attention.sinks": "self_attn.sinks"},
    expert_names={
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.logit_bias": "mlp.router.bias",
        "mlp.gate.weight": "mlp.experts.gate_up_proj",
        "mlp.gate.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.up.weight": "mlp.experts.gate_up_proj",
        "mlp.up.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.down.weight": "mlp.experts.down_proj",
        "mlp.down.bias": "mlp.experts.down_proj_bias",
    },
    has_expert_stacks=True,
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
)
