"""Qwen3-MoE: a mixture of experts in every layer, queries and keys with a norm of each head.

Layers with a dense MLP (decoder_sparse_step, mlp_only_layers), which no published model has, are refused.
"""

from llmb.config.huggingface.mixture_like import MixtureLike

QWEN3_MOE = MixtureLike(
    architecture="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    fields={"qk_norm": "head"},
    defaults={
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    refused={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    expert_fields={
        "count": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "renormalise": "norm_topk_prob",
    },
    aliases={"num_local_experts": "num_experts"},
)
