"""Arcee's AFM: a Llama whose MLPs have no gate, and the square of ReLU as activation."""

from llmb.config.huggingface.llama_like import LlamaLike

ARCEE = LlamaLike(
    architecture="arcee",
    class_name="ArceeForCausalLM",
    fields={"gated": False},
    bias_fields=("attention_bias", "attention_bias"),
    refused={"mlp_bias": False},
)
