"""Small models of every architecture.

llama_model(layers=3, vocab=300)      # any field of model.Model may be given; head_dim follows from hidden and heads
SMALL_MODELS["deepseek"]              # one of each, for tests of all architectures
"""

import math
from dataclasses import replace
from typing import Any

from llmb.config.model import MambaConfig, MlaConfig, Model, MoEConfig, RopeConfig

MLA = MlaConfig(q_rank=24, kv_rank=20, nope_dim=16, rope_dim=8, value_dim=12)
GROUPED_MOE = MoEConfig(
    count=8, top_k=3, ffn=24, shared=1, dense_layers=1, groups=4, top_groups=2, score="sigmoid", scale=2.5
)


def llama_model(**fields: Any) -> Model:
    return _model("llama", {}, fields)


def grok1_model(**fields: Any) -> Model:
    """Return a Grok-1 with logit softcap, post-norms and tied embeddings, unless given otherwise."""
    defaults = {
        "activation": "gelu",
        "tied_embeddings": True,
        "post_norms": True,
        "attn_logit_softcap": 30.0,
        "experts": MoEConfig(count=8, top_k=2, ffn=40, renormalise=False),
    }
    return _model("grok1", defaults, fields)


def deepseek_model(**fields: Any) -> Model:
    """Return a DeepSeek with a dense first layer and grouped top-k routing, unless given otherwise."""
    defaults = {"kv_heads": 4, "rope": RopeConfig(theta=10_000.0), "experts": GROUPED_MOE, "mla": MLA}
    return _model("deepseek", defaults, fields)


def mixtral_model(**fields: Any) -> Model:
    """Return a Mixtral, whose only MLPs are experts."""
    defaults = {"rope": RopeConfig(theta=1_000_000.0), "ffn": 24, "experts": MoEConfig(count=8, top_k=2, ffn=24)}
    return _model("mixtral", defaults, fields)


def qwen3_moe_model(**fields: Any) -> Model:
    """Return a Qwen3-MoE."""
    experts = MoEConfig(count=8, top_k=3, ffn=24)
    return _model("qwen3_moe", {"qk_norm": "head", "rope": RopeConfig(theta=1_000_000.0), "experts": experts}, fields)


def gpt_oss_model(**fields: Any) -> Model:
    """Return a gpt-oss, with YaRN in whose short original context pairs are unscaled, scaled and in between."""
    rope = RopeConfig(theta=150.0, scaling="yarn", factor=32.0, original_tokens=64, beta_fast=4.0, truncate=False)
    defaults = {
        "qkv_bias": True,
        "o_bias": True,
        "attention_sinks": True,
        "attention_pattern": "SF",
        "window": 8,
        "rope": rope,
        "activation": "swigluoai",
        "ffn": 32,
        "experts": MoEConfig(count=4, top_k=2, ffn=32, bias=True),
    }
    model = _model("gpt_oss", defaults, fields)
    if model.rope is None or model.rope.scaling != "yarn":
        return model
    return replace(model, attention_scale=model.head_dim**-0.5 * (0.1 * math.log(model.rope.factor) + 1) ** 2)


def glm4_moe_model(**fields: Any) -> Model:
    """Return a GLM-4.5: DeepSeek's experts behind attention with biases, of whose heads half rotates."""
    rope = RopeConfig(theta=1_000_000.0, partial_rotary_factor=0.5)
    return _model("glm4_moe", {"qkv_bias": True, "qk_norm": "head", "rope": rope, "experts": GROUPED_MOE}, fields)


def minimax_m2_model(**fields: Any) -> Model:
    """Return a MiniMax-M2, whose queries and keys are normed as a whole."""
    experts = MoEConfig(count=8, top_k=2, ffn=24, score="sigmoid")
    rope = RopeConfig(theta=5_000_000.0, partial_rotary_factor=0.5)
    return _model("minimax_m2", {"qk_norm": "projection", "rope": rope, "ffn": 24, "experts": experts}, fields)


def dots1_model(**fields: Any) -> Model:
    """Return a dots.llm1: GLM-4.5's experts behind attention with norms of each head."""
    return _model("dots1", {"qk_norm": "head", "rope": RopeConfig(theta=10_000.0), "experts": GROUPED_MOE}, fields)


def ernie4_5_moe_model(**fields: Any) -> Model:
    """Return an ERNIE 4.5 with experts, of a softmax router with a correction bias."""
    experts = MoEConfig(count=8, top_k=3, ffn=24, shared=2, dense_layers=1, correction_bias=True)
    return _model("ernie4_5_moe", {"rope": RopeConfig(theta=10_000.0), "experts": experts}, fields)


def olmoe_model(**fields: Any) -> Model:
    """Return an OLMoE, whose routing weights are those of a softmax over all experts."""
    experts = MoEConfig(count=8, top_k=3, ffn=24, renormalise=False)
    rope = RopeConfig(theta=10_000.0)
    return _model("olmoe", {"qk_norm": "projection", "ffn": 24, "rope": rope, "experts": experts}, fields)


def nemotron_h_model(pattern: str = "M-M*-", **fields: Any) -> Model:
    """Return a Nemotron-H with a layer for each letter of the pattern."""
    defaults = {
        "layers": len(pattern),
        "pattern": pattern,
        "gated": False,
        "activation": "squared_relu",
        "rope": None,
        "mamba": MambaConfig(heads=6, head_dim=16, groups=2, state=16, chunk=16),
    }
    return _model("nemotron_h", defaults, fields)


def _model(architecture: str, defaults: dict[str, Any], fields: dict[str, Any]) -> Model:
    sizes = {"name": "small", "layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "vocab": 61}
    merged = sizes | defaults | fields
    return Model(**({"architecture": architecture, "head_dim": merged["hidden"] // merged["heads"]} | merged))


_SIZES = {"layers": 4, "ffn": 64, "head_dim": 16, "vocab": 128}
_EXPERTS = MoEConfig(count=4, top_k=2, ffn=48, aux_loss=0.01)
SMALL_MODELS = {
    "llama": llama_model(name="llama", **_SIZES),
    "grok1": grok1_model(
        name="grok1",
        **_SIZES,
        embedding_scale=5.0,
        logit_scale=0.5,
        experts=MoEConfig(count=4, top_k=2, ffn=48, renormalise=False, aux_loss=0.01),
    ),
    "deepseek": deepseek_model(
        name="deepseek",
        **_SIZES,
        mla=MlaConfig(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=16, value_dim=16),
        experts=MoEConfig(count=8, top_k=2, ffn=32, shared=1, dense_layers=1, groups=2, top_groups=1, score="sigmoid"),
    ),
    "mixtral": mixtral_model(name="mixtral", **(_SIZES | {"layers": 2, "ffn": 48}), experts=_EXPERTS),
    "qwen3_moe": qwen3_moe_model(name="qwen3_moe", **(_SIZES | {"layers": 2}), experts=_EXPERTS),
    "gpt_oss": gpt_oss_model(
        name="gpt_oss", **(_SIZES | {"layers": 2, "ffn": 48}), experts=replace(_EXPERTS, bias=True)
    ),
    "glm4_moe": glm4_moe_model(
        name="glm4_moe",
        **(_SIZES | {"layers": 3}),
        experts=replace(GROUPED_MOE, top_k=2, ffn=32, groups=1, top_groups=1, dense_layers=1),
    ),
    "nemotron_h": nemotron_h_model(
        name="nemotron_h",
        **(_SIZES | {"layers": 5}),
        mamba=MambaConfig(heads=4, head_dim=16, groups=2, state=16, chunk=16),
    ),
}
# Nothing divides by the number of ranks: shards are padded, and begin inside a row.
UNEVEN = llama_model(name="uneven", layers=4, hidden=22, ffn=50, vocab=130, head_dim=10)
