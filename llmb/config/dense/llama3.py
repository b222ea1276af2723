"""Llama 2 and 3."""

from llmb.config.huggingface.llama_like import LlamaLike

LLAMA3 = LlamaLike(
    architecture="llama",
    class_name="LlamaForCausalLM",
    bias_fields=("attention_bias", "attention_bias"),
    refused={"mlp_bias": False},
)
