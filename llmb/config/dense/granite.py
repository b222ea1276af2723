"""Granite 3: a Llama with factors on the embedding, on attention logits, on what blocks add, and below the logits."""

from llmb.config.huggingface.llama_like import LlamaLike

GRANITE = LlamaLike(
    architecture="granite",
    class_name="GraniteForCausalLM",
    bias_fields=("attention_bias", "attention_bias"),
    has_granite_factors=True,
    refused={"mlp_bias": False},
)
