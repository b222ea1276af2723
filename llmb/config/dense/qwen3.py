"""Qwen3: a norm on each head of queries and keys, and heads whose width does not follow from the hidden size."""

from llmb.config.huggingface.llama_like import LlamaLike

QWEN3 = LlamaLike(
    architecture="qwen3",
    class_name="Qwen3ForCausalLM",
    fields={"qk_norm": "head"},
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    bias_fields=("attention_bias", "attention_bias"),
    layers_by="flagged_layer_types",
)
