"""Qwen2 and Qwen2.5: query, key and value projections have a bias; small models have tied embeddings."""

from llmb.config.huggingface.llama_like import LlamaLike

QWEN2 = LlamaLike(
    architecture="qwen2",
    class_name="Qwen2ForCausalLM",
    fields={"qkv_bias": True},
    defaults={
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    layers_by="flagged_layer_types",
)
