"""MiniMax-M2: a sigmoid router without groups, a norm of queries and keys as a whole, half of each head rotates.

Released files name the rotated channels (rotary_dim), and settings of the code that they were published with.
"""

from typing import Any

from llmb.config.huggingface.hf_fields import HfConfig, head_dim_of, positive_int
from llmb.config.huggingface.mixture_like import MixtureLike
from llmb.config.mixture.mixtral import MIXTRAL
from llmb.errors import ConfigError


class MiniMaxM2(MixtureLike):
    """MiniMax-M2, whose partial RoPE has two names."""

    def read(self, config: HfConfig) -> dict[str, Any]:
        """Return the fields of model.Model, or raise a ConfigError that names what is not supported."""
        if 0 in (config.get("attn_type_list") or ()):
            raise ConfigError("config.json: attn_type_list with 0 (linear attention) is not supported; only 1 is")
        if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
            factor = positive_int(config, "rotary_dim") / head_dim_of({**self.defaults, **config})
            config = config | {"partial_rotary_factor": factor}
        return super().read(config)


MINIMAX_M2 = MiniMaxM2(
    architecture="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    fields={"qk_norm": "projection"},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
    has_partial_rotary=True,
    refused={
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
    },
    expert_fields=MIXTRAL.expert_fields,
    experts={"score": "sigmoid"},
    expert_names=MIXTRAL.expert_names | {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"},
    aliases=MIXTRAL.aliases,
)
