"""Small mixtures of experts in the variants that matter: what tests prove and docs/models.md lists."""

from dataclasses import replace
from typing import Any

from small_models import (
    GROUPED_MOE,
    dots1_model,
    ernie4_5_moe_model,
    glm4_moe_model,
    gpt_oss_model,
    minimax_m2_model,
    mixtral_model,
    olmoe_model,
    qwen3_moe_model,
)

from llmb.config.model import MoEConfig, RopeConfig

ONE_GROUP = replace(GROUPED_MOE, groups=1, top_groups=1, shared=2, dense_layers=2, scale=1.0, renormalise=False)
SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "head_dim": 16, "vocab": 97}
NARROW = SIZES | {"ffn": 32}
# Compared at night only: other sizes and switches of what the first case of the architecture computes.
NIGHTLY_MIXTURES = {"one-group-two-shared-tied", "quarter-rotary-tied", "biases-one-kv-head-tied", "biases-tied"}
MIXTURE_CASES = [
    mixtral_model(name="full", **(SIZES | {"ffn": 24, "vocab": 89})),
    mixtral_model(
        name="window-one-kv-head-tied", kv_heads=1, tied_embeddings=True, attention_pattern="S", window=9,
        **(SIZES | {"ffn": 24}),
    ),
    qwen3_moe_model(name="qk-norm", norm_eps=1e-6, **SIZES),
    qwen3_moe_model(
        name="tied-not-renormalized", kv_heads=1, tied_embeddings=True,
        experts=MoEConfig(count=6, top_k=2, ffn=24, renormalise=False), **SIZES,
    ),
    # Windows are shorter than the sequence.
    gpt_oss_model(name="sinks-window-biases-yarn", **NARROW),
    gpt_oss_model(
        name="full-layer-first-no-attention-biases", layers=3, kv_heads=1, qkv_bias=False, o_bias=False,
        attention_pattern="FS", window=1, rope=RopeConfig(theta=10_000.0), **NARROW,
    ),
    glm4_moe_model(
        name="one-group-two-shared-tied", layers=3, kv_heads=1, tied_embeddings=True,
        qkv_bias=False, qk_norm=None, rope=RopeConfig(theta=100.0), experts=ONE_GROUP, **SIZES,
    ),
    glm4_moe_model(name="qk-norm-biases-groups", **SIZES),
    minimax_m2_model(name="projection-norms", **(SIZES | {"ffn": 24})),
    minimax_m2_model(
        name="quarter-rotary-tied", kv_heads=1, tied_embeddings=True,
        rope=RopeConfig(theta=100.0, partial_rotary_factor=0.25), **(SIZES | {"ffn": 24}),
    ),
    dots1_model(name="biases-one-kv-head-tied", kv_heads=1, qkv_bias=True, o_bias=True, tied_embeddings=True, **SIZES),
    dots1_model(name="window-in-later-layers", attention_pattern="FS", window=9, **SIZES),
    ernie4_5_moe_model(name="correction-bias-tied", tied_embeddings=True, **(SIZES | {"head_dim": 12})),
    olmoe_model(name="not-renormalized", **(SIZES | {"ffn": 24, "head_dim": 12})),
    olmoe_model(
        name="biases-tied", tied_embeddings=True, qkv_bias=True, o_bias=True,
        experts=MoEConfig(count=6, top_k=2, ffn=24), **(SIZES | {"ffn": 24, "head_dim": 12}),
    ),
]  # fmt: skip
