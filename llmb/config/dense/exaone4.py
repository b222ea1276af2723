"""EXAONE 4: norms on outputs, and on each head of queries and keys.

With sliding windows, the layers without one have no position embedding (NoPE).
"""

from llmb.config.dense.olmo2 import OLMO2
from llmb.config.huggingface.llama_like import LlamaLike

EXAONE4 = LlamaLike(
    architecture="exaone4",
    class_name="Exaone4ForCausalLM",
    fields={"pre_norms": False, "post_norms": True, "qk_norm": "head"},
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    layers_by="layer_types",
    has_rope_in_windows_only=True,
    names=OLMO2.names,
)
