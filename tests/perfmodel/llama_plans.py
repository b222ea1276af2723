"""Models and plans for tests of the planner."""

from dataclasses import replace

from small_models import llama_model

from llmb.config.offload_plan import Plan

LLAMA_8B = llama_model(name="8B", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
LLAMA_1B = llama_model(
    name="1B", layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=128256, tied_embeddings=True
)
SHORT = replace(LLAMA_8B, name="short", layers=6)  # as wide, so that its speed means something
TINY = llama_model(name="tiny", layers=3, ffn=64, vocab=300)


# All of an 8B streams through the device; activations keep their attention.
STREAMING = Plan(
    dtype="bf16", seqlen=8192, gbs=16, chunk_tokens=16384, seqs_per_group=2, groups_per_round=1, loss_tokens=2048,
    update="stochastic", update_at="backward", resident_params=0, resident_grads=0, resident_states=0,
    param_blocks=5, grad_blocks=5, state_blocks=2, inp_slots=4, kv_slots=3, attn_slots=3, rest_slots=0,
    levels="A" * 32,
)  # fmt: skip


def plan_of(**changed) -> Plan:
    """That plan with some of it changed."""
    return replace(STREAMING, **changed)
