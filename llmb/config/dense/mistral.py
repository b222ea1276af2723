"""Mistral: all layers have a sliding window, in the first versions; sliding_window is null in later ones."""

from llmb.config.huggingface.llama_like import LlamaLike

MISTRAL = LlamaLike(
    architecture="mistral",
    class_name="MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    layers_by="sliding_window",
    refused={"layer_types": None},
)
