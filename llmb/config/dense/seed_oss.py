"""Seed-OSS: biases of queries, keys and values; published with dropouts, which only training has."""

from llmb.config.huggingface.llama_like import LlamaLike

SEED_OSS = LlamaLike(
    architecture="seed_oss",
    class_name="SeedOssForCausalLM",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
    bias_fields=("attention_bias", "attention_out_bias"),
    dropout_fields=("attention_dropout", "residual_dropout"),
    refused={"mlp_bias": False},
)
