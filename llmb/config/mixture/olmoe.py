"""OLMoE: Qwen3-MoE's experts, and norms of queries and keys as a whole."""

from llmb.config.huggingface.mixture_like import MixtureLike

OLMOE = MixtureLike(
    architecture="olmoe",
    class_name="OlmoeForCausalLM",
    fields={"qk_norm": "projection"},
    defaults={"norm_topk_prob": False},
    bias_fields=("attention_bias", "attention_bias"),
    refused={"clip_qkv": None},
    expert_fields={
        "count": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "intermediate_size",
        "renormalise": "norm_topk_prob",
    },
    aliases={"num_local_experts": "num_experts"},
)
