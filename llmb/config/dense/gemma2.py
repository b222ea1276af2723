"""Gemma 2: softcaps on attention logits and on logits, every other layer with a sliding window, norms on both sides.

Weights of norms in files are what is added to 1.
"""

from llmb.config.huggingface.llama_like import LLAMA_NAMES, LlamaLike

GEMMA_NAMES = LLAMA_NAMES | {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
GEMMA2 = LlamaLike(
    architecture="gemma2",
    class_name="Gemma2ForCausalLM",
    fields={"post_norms": True},
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
    },
    bias_fields=("attention_bias", "attention_bias"),
    activation_field="hidden_activation",
    layers_by="layer_types",
    has_gemma_scalars=True,
    refused={"use_bidirectional_attention": None, "sliding_window_pattern": 2},  # `transformers` reads no pattern here
    names=GEMMA_NAMES,
    norm_offset=1.0,
)
