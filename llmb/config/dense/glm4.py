"""GLM-4-0414: GLM with norms on both sides of each block."""

from dataclasses import replace

from llmb.config.dense.glm import GLM

GLM4 = replace(
    GLM,
    architecture="glm4",
    class_name="Glm4ForCausalLM",
    fields={"post_norms": True},
    names=GLM.names
    | {
        "attention_post_norm.weight": "post_self_attn_layernorm.weight",
        "mlp_post_norm.weight": "post_mlp_layernorm.weight",
    },
)
