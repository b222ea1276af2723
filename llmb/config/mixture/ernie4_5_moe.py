"""ERNIE 4.5 with experts: a softmax router whose selection a bias corrects, and shared experts."""

from typing import Any

from llmb.config.huggingface.hf_fields import HfConfig, positive_int
from llmb.config.huggingface.mixture_like import EXPERT_NAMES, MixtureLike
from llmb.config.serialization import convert
from llmb.errors import ConfigError


class Ernie(MixtureLike):
    """ERNIE 4.5, whose files say which layers have experts."""

    def read(self, config: HfConfig) -> dict[str, Any]:
        """Return the fields of model.Model, or raise a ConfigError that names what is not supported."""
        last = positive_int(config, "num_hidden_layers") - 1
        end = convert(int, config.get("moe_layer_end_index", last), "config.json.moe_layer_end_index")
        if end != -1 and end < last:
            raise ConfigError(
                f"config.json: moe_layer_end_index={end} is not supported; only {last}, the last layer, is"
            )
        return super().read(config)


ERNIE4_5_MOE = Ernie(
    architecture="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 500_000.0},
    interleaved_rope=True,
    refused={"moe_layer_interval": 1, "moe_norm_min": 1e-12, "moe_use_aux_free": True},
    expert_fields={
        "count": "moe_num_experts",
        "top_k": "moe_k",
        "ffn": "moe_intermediate_size",
        "shared": "moe_num_shared_experts",
        "dense_layers": "moe_layer_start_index",
    },
    experts={"correction_bias": True},
    expert_names=EXPERT_NAMES | {"mlp.router.bias": "mlp.moe_statics.e_score_correction_bias"},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    has_mtp_layers=True,
)
