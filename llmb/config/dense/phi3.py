"""Phi-3 and Phi-4: files hold q, k and v as one tensor, gate and up as another; Phi-4-mini rotates part of a head."""

from llmb.config.huggingface.llama_like import LLAMA_NAMES, LlamaLike

PHI3 = LlamaLike(
    architecture="phi3",
    class_name="Phi3ForCausalLM",
    layers_by="sliding_window",
    rope_types=("longrope",),
    has_partial_rotary=True,
    refused={"layer_types": None},
    names=LLAMA_NAMES
    | {f"attention.{matrix}.weight": "self_attn.qkv_proj.weight" for matrix in "qkv"}
    | {f"mlp.{matrix}.weight": "mlp.gate_up_proj.weight" for matrix in ("gate", "up")},
)
