"""ERNIE 4.5, dense: a Llama whose heads rotate in pairs of neighbours."""

from llmb.config.huggingface.llama_like import LlamaLike

ERNIE4_5 = LlamaLike(
    architecture="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 500_000.0},
    interleaved_rope=True,
)
