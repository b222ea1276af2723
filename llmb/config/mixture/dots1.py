"""dots.llm1: GLM-4.5's experts behind attention with norms of each head, without partial RoPE."""

from llmb.config.huggingface.mixture_like import MixtureLike
from llmb.config.mixture.glm4_moe import GLM4_MOE

DOTS1 = MixtureLike(
    architecture="dots1",
    class_name="Dots1ForCausalLM",
    fields={"qk_norm": "head"},
    defaults={
        "num_key_value_heads": 32,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    bias_fields=("attention_bias", "attention_bias"),
    layers_by="layer_types",
    expert_fields=GLM4_MOE.expert_fields,
    experts=GLM4_MOE.experts,
    expert_names=GLM4_MOE.expert_names,
    aliases=GLM4_MOE.aliases,
)
