"""GLM-4.5, 4.6 and 4.7: DeepSeek's router and shared expert behind grouped-query attention.

Half of each head rotates; GLM-4.5 has norms of each head of queries and keys, GLM-4.5-Air has none.
"""

from llmb.config.huggingface.hf_fields import GROUPED_EXPERT_FIELDS
from llmb.config.huggingface.mixture_like import EXPERT_NAMES, MixtureLike

GLM4_MOE = MixtureLike(
    architecture="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    defaults={"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "use_qk_norm": False, "norm_topk_prob": True},
    bias_fields=("attention_bias", ""),
    qk_norm_field="use_qk_norm",
    has_partial_rotary=True,
    expert_fields=GROUPED_EXPERT_FIELDS,
    experts={"score": "sigmoid"},
    expert_names=EXPERT_NAMES | {"mlp.router.bias": "mlp.gate.e_score_correction_bias"},
    aliases={"num_local_experts": "n_routed_experts"},
    has_mtp_layers=True,
)
