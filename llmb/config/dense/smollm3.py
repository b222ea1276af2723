"""SmolLM3: every fourth layer has no position embedding (NoPE)."""

from llmb.config.huggingface.llama_like import LlamaLike

SMOLLM3 = LlamaLike(
    architecture="smollm3",
    class_name="SmolLM3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    bias_fields=("attention_bias", "attention_bias"),
    layers_by="no_rope_layers",
    refused={"mlp_bias": False},
)
