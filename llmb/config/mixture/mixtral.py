"""Mixtral: a Llama whose MLPs are experts, chosen by a softmax over the best few."""

from llmb.config.huggingface.mixture_like import MixtureLike

MIXTRAL = MixtureLike(
    architecture="mixtral",
    class_name="MixtralForCausalLM",
    defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    layers_by="sliding_window",
    expert_fields={"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
    expert_names={
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        **{
            f"mlp.{matrix}.weight": f"block_sparse_moe.experts.{{expert}}.{hf_name}.weight"
            for matrix, hf_name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    },
    aliases={"num_experts": "num_local_experts"},
)
