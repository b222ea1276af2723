"""Dense decoders like Llama: how config.json and weight files describe each, as data.

    QWEN3 = LlamaLike(architecture="qwen3", class_name="Qwen3ForCausalLM", fields={"qk_norm": "head"}, ...)

All of them are one network (`llmb/models/llama.py`), which a model.Model describes field by field. A new model of this
kind is a file with a LlamaLike, listed in `dense_models.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmb.config.huggingface.hf_fields import (
    ACTIVATIONS,
    SIZE_FIELDS,
    HfConfig,
    check_supported,
    from_hf,
    head_dim_of,
    positive_int,
    read_activation,
    required,
    to_hf,
)
from llmb.config.huggingface.hf_rope import ROPE_FIELDS, from_hf_rope, to_hf_rope, to_hf_rope_sections
from llmb.config.model import Model, RopeConfig
from llmb.config.serialization import convert
from llmb.errors import ConfigError

LAYER_TYPES = {"full_attention": "F", "sliding_attention": "S"}
# Our name -> name in files, of the tensors of a layer; a model has those that its fields ask for.
LLAMA_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{matrix}.weight": f"self_attn.{matrix}_proj.weight" for matrix in "qkvo"},
    **{f"attention.{matrix}_bias": f"self_attn.{matrix}_proj.bias" for matrix in "qkvo"},
    **{f"attention.{norm}.weight": f"self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")},
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"mlp.{matrix}.weight": f"mlp.{matrix}_proj.weight" for matrix in ("gate", "up", "down")},
}


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """Reads and writes the config.json of one architecture, and names its tensors.

    Where several of our tensors have one name in files, that is a tensor with the rows of all of them, in this order.
    """

    architecture: str
    model_type: str = ""  # of config.json; empty: the architecture
    class_name: str  # of `transformers`
    fields: dict[str, Any] = field(default_factory=dict)  # of model.Model, the same in all these models
    defaults: HfConfig = field(default_factory=dict)  # of config.json, for fields that are missing there
    bias_fields: tuple[str, str] = ("", "")  # of config.json, with biases of q, k and v, and of o; empty: without
    qk_norm_field: str = ""  # of config.json: whether queries and keys have a norm of each head
    activation_field: str = "hidden_act"
    # Where layers with a sliding window, or without RoPE, are listed. flagged_layer_types: only if use_sliding_window.
    layers_by: Literal["none", "sliding_window", "layer_types", "flagged_layer_types", "no_rope_layers"] = "none"
    has_granite_factors: bool = False  # factors on embedding, attention logits, what blocks add, and below the logits
    dropout_fields: tuple[str, ...] = ()  # of config.json, published with a value that only training is about
    has_gemma_scalars: bool = False  # softcaps, scale of attention logits and of the embedding
    rope_types: tuple[str, ...] = tuple(ROPE_FIELDS)  # of scaling
    has_partial_rotary: bool = False  # partial_rotary_factor: only the first channels of a head have RoPE
    interleaved_rope: bool = False  # channels 2i and 2i + 1 are a pair, not i and i + half
    has_local_rope: bool = False  # another RoPE in layers with a sliding window
    has_rope_sections: bool = False  # written in the newer format, a section for each type of layer
    has_rope_in_windows_only: bool = False  # layers without a window have no RoPE, in models with one
    refused: HfConfig = field(default_factory=dict)  # of config.json: field -> the only supported value
    names: dict[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    norm_offset: float = 0.0  # what is added to the weights of norms in files

    @property
    def hf_type(self) -> str:
        return self.model_type or self.architecture

    @property
    def attention_fields(self) -> set[str]:
        """Fields of model.Model about attention and its norms that these models may have other than Llama."""
        names = {name for name, field in zip(("qkv_bias", "o_bias"), self.bias_fields, strict=True) if field}
        names |= {"attention_pattern", "window"} if self.layers_by != "none" else set()
        names |= {"qk_norm"} if self.qk_norm_field else set()
        return names | self.fields.keys()

    @property
    def read_fields(self) -> set[str]:
        """Fields of config.json that other architectures support with one value only."""
        names = {*self.bias_fields, *self.dropout_fields} | (
            {"partial_rotary_factor"} if self.has_partial_rotary else set()
        )
        return names | ({"sliding_window"} if self.layers_by != "none" else set())

    def read(self, config: HfConfig) -> dict[str, Any]:
        """Return the fields of model.Model, or raise a ConfigError that names what is not supported."""
        config = {**self.defaults, **config}
        check_supported(config, self.refused)
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = config.get("num_attention_heads")
        rope = self._read_rope(config, "full_attention" if self.has_local_rope else "")
        pattern, window = self._read_layers(config)
        qkv_bias, o_bias = (bool(field and config.get(field)) for field in self.bias_fields)
        head_dim = head_dim_of(config)
        _check_rotated_channels(rope, head_dim)
        fields = from_hf(config, SIZE_FIELDS) | {
            "architecture": self.architecture,
            "head_dim": head_dim,
            "activation": read_activation(config, self.activation_field),
            "norm_eps": required(config, "rms_norm_eps"),
            "rope": rope,
            "attention_pattern": pattern,
            "window": window,
            "qkv_bias": qkv_bias,
            "o_bias": o_bias,
        }
        if self.qk_norm_field:
            fields["qk_norm"] = "head" if config.get(self.qk_norm_field) else None
        if self.has_granite_factors:
            fields |= _read_granite_factors(config)
        if self.has_gemma_scalars:
            fields |= _read_gemma_scalars(config)
        if self.has_local_rope and "S" in pattern:
            local = config | {"rope_theta": config.get("rope_local_base_freq")}
            fields["local_rope"] = self._read_rope(local, "sliding_attention")
        return fields | self.fields

    def write(self, model: Model) -> HfConfig:
        """Return the config.json of a model; what it cannot express is found when it is read back."""
        config: HfConfig = {
            "architectures": [self.class_name],
            "model_type": self.hf_type,
            **to_hf(model, SIZE_FIELDS),
            "head_dim": model.head_dim,
            self.activation_field: ACTIVATIONS.get(model.activation),
            "rms_norm_eps": model.norm_eps,
            **to_hf_rope(model),
            **self._write_layers(model),
        }
        biases = zip(self.bias_fields, (model.qkv_bias, model.o_bias), strict=True)
        config |= {field: has_bias for field, has_bias in biases if field}
        if self.qk_norm_field:
            config[self.qk_norm_field] = model.qk_norm == "head"
        if self.has_partial_rotary and model.rope is not None:
            config["partial_rotary_factor"] = model.rope.partial_rotary_factor
        if self.has_granite_factors:
            config |= _write_granite_factors(model)
        if self.has_gemma_scalars:
            config |= _write_gemma_scalars(model)
        if self.has_rope_sections:
            config = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
            config["rope_parameters"] = to_hf_rope_sections(model)
        elif self.has_local_rope:
            config["rope_local_base_freq"] = (model.local_rope or RopeConfig(theta=10_000.0)).theta
        return config

    def layer_names(self, model: Model, index: int = 0) -> dict[str, str]:
        """Map our names of the tensors of a layer to those in files."""
        missing = {
            "attention_norm.weight": not model.pre_norms,
            "mlp_norm.weight": not model.pre_norms,
            "attention_post_norm.weight": not model.post_norms,
            "mlp_post_norm.weight": not model.post_norms,
            **dict.fromkeys(("attention.q_bias", "attention.k_bias", "attention.v_bias"), not model.qkv_bias),
            "attention.o_bias": not model.o_bias,
            "attention.sinks": not model.attention_sinks,
            "mlp.gate.weight": not model.gated,
            **dict.fromkeys(("attention.q_norm.weight", "attention.k_norm.weight"), model.qk_norm is None),
        }
        return {name: hf_name for name, hf_name in self.names.items() if not missing.get(name)}

    def _read_rope(self, config: HfConfig, layer_type: str) -> dict[str, Any]:
        rope = from_hf_rope(config, self.rope_types, layer_type)
        if not self.has_partial_rotary:
            check_supported(rope, {"partial_rotary_factor": 1.0})
        return rope | ({"mscale_all_dim": 0.0} if rope.get("scaling") == "yarn" else {})  # of MLA only

    def _read_layers(self, config: HfConfig) -> tuple[str, int | None]:
        """Return the attention pattern and the window; none without layers that have one."""
        layers, window = positive_int(config, "num_hidden_layers"), config.get("sliding_window")
        if self.layers_by == "no_rope_layers":
            check_supported(config, {"use_sliding_window": False})
            if config.get("layer_types") and "S" in read_layer_types(config, layers):
                raise ConfigError(
                    "config.json: layer_types with sliding_attention is not supported; only full_attention is"
                )
            return shortest_period(_read_no_rope_layers(config, layers)), None
        is_used = window is not None and (
            self.layers_by != "flagged_layer_types" or bool(config.get("use_sliding_window"))
        )
        is_listed = self.layers_by == "layer_types" and (config.get("layer_types") or self.has_local_rope)
        if is_listed and "S" in read_layer_types(config, layers):
            required(config, "sliding_window")
        if self.layers_by == "none" or not is_used:
            return "F", None
        letters = "S" * layers
        if self.layers_by != "sliding_window":
            letters = read_layer_types(config, layers)
        if self.has_rope_in_windows_only:
            letters = letters.replace("F", "N")
        pattern = shortest_period(letters)
        return pattern, positive_int(config, "sliding_window") if "S" in pattern else None

    def _write_layers(self, model: Model) -> HfConfig:
        kinds = [model.attention_kind(layer) for layer in range(model.layers)]
        if self.layers_by == "no_rope_layers":
            return {"no_rope_layers": [int(kind != "N") for kind in kinds], "use_sliding_window": False}
        if self.layers_by == "none":
            return {}
        config: HfConfig = {"sliding_window": model.window}
        if self.layers_by != "sliding_window":
            by_letter = {letter: name for name, letter in LAYER_TYPES.items()}
            if self.has_rope_in_windows_only and "N" in kinds:
                by_letter = {"S": by_letter["S"], "N": by_letter["F"]}
                config["sliding_window"] = model.window or self.defaults["sliding_window"]  # if no layer has it
            config["layer_types"] = [by_letter.get(kind, kind) for kind in kinds]
        if self.layers_by == "flagged_layer_types":
            config["use_sliding_window"] = model.window is not None
        return config


def same_layers(model: Model, restored: Model) -> Model:
    """Return the restored model with the pattern of the first, if both give all layers the same attention."""
    kinds = [[each.attention_kind(layer) for layer in range(model.layers)] for each in (model, restored)]
    return replace(restored, attention_pattern=model.attention_pattern) if kinds[0] == kinds[1] else restored


def read_layer_types(config: HfConfig, layers: int) -> str:
    """Return a letter for each layer, from layer_types or the older rules that it replaced."""
    names = convert(tuple[str, ...] | None, config.get("layer_types"), "config.json.layer_types")
    if names is None:
        first = config.get("max_window_layers")  # layers from here on have a window
        if first is not None:
            return "".join("S" if layer >= first else "F" for layer in range(layers))
        period = positive_int(config, "sliding_window_pattern")  # each layer of this number has none
        return "".join("S" if (layer + 1) % period else "F" for layer in range(layers))
    unknown = sorted(set(names) - LAYER_TYPES.keys())
    if unknown or len(names) != layers:
        raise ConfigError(
            f"config.json.layer_types: {', '.join(unknown) or len(names)} is not supported; it must be {layers} of "
            f"{', '.join(LAYER_TYPES)}"
        )
    return "".join(LAYER_TYPES[name] for name in names)


def _check_rotated_channels(rope: dict[str, Any], head_dim: int) -> None:
    """Reject a fraction of channels with RoPE that is no whole number of pairs."""
    factor = convert(float, rope.get("partial_rotary_factor", 1.0), "config.json.partial_rotary_factor")
    channels = int(head_dim * factor)
    if factor != 1.0 and (channels < 2 or channels % 2):
        raise ConfigError(
            f"config.json: partial_rotary_factor={factor} is not supported: it rotates {channels} of {head_dim} "
            "channels of a head, which are no whole pairs"
        )


def _read_no_rope_layers(config: HfConfig, layers: int) -> str:
    """Return a letter for each layer; 0 in no_rope_layers is a layer without position embedding."""
    flags: Sequence[int] | None = convert(
        tuple[int, ...] | None, config.get("no_rope_layers"), "config.json.no_rope_layers"
    )
    if flags is None:
        interval = positive_int(config, "no_rope_layer_interval")
        flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(flags) < layers:
        raise ConfigError(f"config.json.no_rope_layers has {len(flags)} entries for {layers} layers")
    return "".join("F" if flag else "N" for flag in flags[:layers])


def shortest_period(letters: str) -> str:
    """Return the shortest pattern that, repeated, gives these letters."""
    lengths = range(1, len(letters) + 1)
    return next(letters[:length] for length in lengths if (letters[:length] * len(letters))[: len(letters)] == letters)


def _read_gemma_scalars(config: HfConfig) -> dict[str, Any]:
    return {
        "attn_logit_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
        "attention_scale": positive_int(config, "query_pre_attn_scalar") ** -0.5,
        "embedding_scale": math.sqrt(positive_int(config, "hidden_size")),
    }


def _write_gemma_scalars(model: Model) -> HfConfig:
    return {
        "attn_logit_softcapping": model.attn_logit_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "query_pre_attn_scalar": round(model.softmax_scale**-2),
    }


GRANITE_FACTORS = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
}


def _read_granite_factors(config: HfConfig) -> dict[str, Any]:
    defaults = dict.fromkeys((*GRANITE_FACTORS.values(), "logits_scaling"), 1.0)
    factors = {name: convert(float, required(defaults | config, name), f"config.json.{name}") for name in defaults}
    if factors["logits_scaling"] == 0:
        raise ConfigError("config.json.logits_scaling: 0 divides the logits; it must be another number")
    return {"logit_scale": 1 / factors["logits_scaling"]} | {
        name: factors[hf_name] for name, hf_name in GRANITE_FACTORS.items()
    }


def _write_granite_factors(model: Model) -> HfConfig:
    scaling = float(f"{1 / model.logit_scale:.12g}")  # 1 / (1 / 49) is not 49
    return {
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": model.softmax_scale,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": scaling,
    }
