"""OLMo 3: OLMo 2 with a sliding window in three of four layers; scaled RoPE is in the fourth only."""

from dataclasses import replace

from llmb.config.dense.olmo2 import OLMO2

OLMO3 = replace(
    OLMO2,
    architecture="olmo3",
    class_name="Olmo3ForCausalLM",
    defaults={
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 500_000.0,
    },
    layers_by="layer_types",
    has_local_rope=True,
    has_rope_sections=True,
    # `transformers` reads no other pattern here, and its versions disagree about a theta that is not in a section.
    refused={"sliding_window_pattern": 4, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0},
)
