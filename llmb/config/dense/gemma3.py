"""Gemma 3, text only: as Gemma 2 without softcaps, with a norm on each head of queries and keys and two RoPE bases.

Five of six layers have a sliding window, and their own RoPE. Missing fields are those of the published 4b.
"""

from dataclasses import replace

from llmb.config.dense.gemma2 import GEMMA2

GEMMA3 = replace(
    GEMMA2,
    architecture="gemma3",
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    fields={"post_norms": True, "qk_norm": "head"},
    defaults=GEMMA2.defaults
    | {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    has_local_rope=True,
    refused={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
)
