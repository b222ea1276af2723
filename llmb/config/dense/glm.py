"""GLM-4 of 2024: half of each head rotates, in pairs of neighbours; files hold gate and up as one tensor."""

from llmb.config.huggingface.llama_like import LLAMA_NAMES, LlamaLike

GLM = LlamaLike(
    architecture="glm",
    class_name="GlmForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    bias_fields=("attention_bias", ""),
    has_partial_rotary=True,
    interleaved_rope=True,
    names=LLAMA_NAMES | {f"mlp.{matrix}.weight": "mlp.gate_up_proj.weight" for matrix in ("gate", "up")},
)
