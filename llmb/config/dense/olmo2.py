"""OLMo 2: norms on the outputs of attention and MLP instead of their inputs, and on queries and keys as a whole."""

from llmb.config.huggingface.llama_like import LLAMA_NAMES, LlamaLike

OLMO2 = LlamaLike(
    architecture="olmo2",
    class_name="Olmo2ForCausalLM",
    fields={"pre_norms": False, "post_norms": True, "qk_norm": "projection"},
    bias_fields=("attention_bias", "attention_bias"),
    names=LLAMA_NAMES
    | {
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
    },
)
