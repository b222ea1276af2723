"""Llama 2 and 3."""

from llmb.config.huggingface.llama_like import LlamaLike

LLAMA3 = LlamaLike(architecture="llama", class_name="LlamaForCausalLM", optional_bias=True, refused={"mlp_bias": False})
