"""Small models of every dense architecture, in the variants that matter: what tests prove and docs/models.md lists."""

from dataclasses import replace
from typing import Any

from llmb.config.model import Model, RopeConfig

SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 96, "norm_eps": 1e-6,
    "rope": RopeConfig(theta=10_000.0),
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "activation": "gelu", "post_norms": True, "tied_embeddings": True, "embedding_scale": 32**0.5,
    "attention_scale": 24**-0.5,
}  # fmt: skip

GRANITE: dict[str, Any] = {
    "embedding_scale": 12.0, "attention_scale": 0.2, "residual_scale": 0.22, "logit_scale": 1 / 13,
}  # fmt: skip
HALF_ROTARY = RopeConfig(theta=10_000.0, partial_rotary_factor=0.5)
LONGROPE = RopeConfig(
    theta=100.0, partial_rotary_factor=0.75, scaling="longrope", factor=32.0, original_tokens=2, attention_factor=1.2,
    short_factors=(1.0, 1.1, 1.5), long_factors=(1.0, 3.0, 9.0),
)  # fmt: skip

# Compared at night only: other sizes and switches of what the first case of the architecture computes.
NIGHTLY_CASES = {
    "factors-biases-one-kv-head", "all-biases-one-kv-head-tied", "whole-rotary-one-kv-head-tied",
    "quarter-rotary-one-kv-head-tied", "one-kv-head", "plain-mlp-biases-one-kv-head-tied",
}  # fmt: skip


def _case(architecture: str, name: str, **fields: Any) -> Model:
    return Model(**(SIZES | {"architecture": architecture, "name": name} | fields))


DENSE_CASES = [
    _case("llama", "biases", qkv_bias=True, o_bias=True, kv_heads=4),
    _case("qwen2", "bias-tied", qkv_bias=True, tied_embeddings=True, head_dim=8),
    _case("qwen2", "window-in-later-layers-one-kv-head", qkv_bias=True, layers=3, attention_pattern="FSS", window=7,
          kv_heads=1),
    _case("qwen3", "qk-norm-tied", qk_norm="head", tied_embeddings=True),
    _case("qwen3", "yarn-biases-one-kv-head", qk_norm="head", kv_heads=1, qkv_bias=True, o_bias=True, rope=RopeConfig(
        theta=100.0, scaling="yarn", factor=4.0, original_tokens=16, beta_fast=4.0, attention_factor=1.5)),
    _case("mistral", "window", attention_pattern="S", window=5),
    _case("mistral", "full-one-kv-head-tied", kv_heads=1, tied_embeddings=True),
    _case("smollm3", "no-rope-layer", layers=4, attention_pattern="FFFN", tied_embeddings=True),
    # All layers with RoPE: without, a bias of the keys changes no attention and has no gradient.
    _case("smollm3", "biases-one-kv-head", kv_heads=1, qkv_bias=True, o_bias=True),
    _case("phi3", "fused-rows", head_dim=8),
    _case("phi3", "partial-rotary-window", rope=RopeConfig(theta=10_000.0, partial_rotary_factor=0.75),
          head_dim=8, attention_pattern="S", window=9, kv_heads=4),
    _case("phi3", "longrope-partial-rotary", rope=LONGROPE, head_dim=8, tied_embeddings=True),
    _case("phi3", "longrope-within-the-original-context-one-kv-head", rope=replace(LONGROPE, original_tokens=64),
          head_dim=8, kv_heads=1),
    _case("olmo2", "post-norms", head_dim=8, pre_norms=False, post_norms=True, qk_norm="projection"),
    _case("olmo2", "biases-one-kv-head-tied", head_dim=8, pre_norms=False, post_norms=True, qk_norm="projection",
          kv_heads=1, qkv_bias=True, o_bias=True, tied_embeddings=True),
    _case("olmo3", "window-yarn-in-full-layers", layers=4, head_dim=8, pre_norms=False, post_norms=True,
          qk_norm="projection", attention_pattern="SSSF", window=7, local_rope=RopeConfig(theta=500_000.0),
          rope=RopeConfig(theta=500_000.0, scaling="yarn", factor=8.0, original_tokens=16, attention_factor=1.2)),
    _case("olmo3", "biases-one-kv-head-tied", head_dim=8, pre_norms=False, post_norms=True, qk_norm="projection",
          kv_heads=1, qkv_bias=True, o_bias=True, tied_embeddings=True, attention_pattern="FS", window=3,
          rope=RopeConfig(theta=1_000.0), local_rope=RopeConfig(theta=100.0)),
    _case("exaone4", "window-no-rope-in-full-layers", layers=4, pre_norms=False, post_norms=True, qk_norm="head",
          attention_pattern="SSSN", window=6),
    _case("exaone4", "full-one-kv-head-tied", pre_norms=False, post_norms=True, qk_norm="head", kv_heads=1,
          tied_embeddings=True, rope=RopeConfig(theta=100.0, scaling="llama3", factor=8.0, original_tokens=64)),
    _case("gemma2", "softcaps-window", attn_logit_softcap=5.0, logit_softcap=4.0, attention_pattern="SF", window=6,
          **GEMMA),
    _case("gemma2", "no-softcaps-biases-one-kv-head", attention_pattern="SF", window=6, kv_heads=1, qkv_bias=True,
          o_bias=True, **GEMMA),
    _case("gemma3", "two-ropes", layers=3, qk_norm="head", attention_pattern="SSF", window=6,
          rope=RopeConfig(theta=1e6, scaling="linear", factor=8.0), local_rope=RopeConfig(theta=10_000.0), **GEMMA),
    _case("granite", "factors-tied", tied_embeddings=True, head_dim=8, **GRANITE),
    _case("granite", "factors-biases-one-kv-head", head_dim=8, kv_heads=1, qkv_bias=True, o_bias=True, **GRANITE),
    _case("seed_oss", "qkv-biases", qkv_bias=True),
    _case("seed_oss", "all-biases-one-kv-head-tied", qkv_bias=True, o_bias=True, kv_heads=1, tied_embeddings=True),
    _case("glm", "half-rotary-biases", qkv_bias=True, rope=HALF_ROTARY),
    _case("glm", "whole-rotary-one-kv-head-tied", kv_heads=1, tied_embeddings=True),
    _case("glm4", "half-rotary-post-norms-biases", qkv_bias=True, post_norms=True, rope=HALF_ROTARY),
    _case("glm4", "quarter-rotary-one-kv-head-tied", kv_heads=1, post_norms=True, tied_embeddings=True,
          rope=RopeConfig(theta=100.0, partial_rotary_factor=0.25)),
    _case("ernie4_5", "tied", tied_embeddings=True),
    _case("ernie4_5", "one-kv-head", kv_heads=1, head_dim=8),
    _case("arcee", "plain-mlp", gated=False, activation="squared_relu"),
    _case("arcee", "plain-mlp-biases-one-kv-head-tied", gated=False, activation="silu", kv_heads=1, qkv_bias=True,
          o_bias=True, tied_embeddings=True),
    _case("gemma3", "softcap-biases-one-kv-head-untied", qk_norm="head", attention_pattern="SF", window=6, kv_heads=1,
          qkv_bias=True, o_bias=True, logit_softcap=4.0, local_rope=RopeConfig(theta=500.0),
          **(GEMMA | {"tied_embeddings": False})),
]  # fmt: skip
