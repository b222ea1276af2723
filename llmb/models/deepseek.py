"""DeepSeek-V3 and R1: a decoder with MLA and MoE, the first layers with a dense MLP.

    network = DeepSeek(model)           # model: a model.Model
    loss = network(tokens_BT, labels_BT)

Compared with `transformers` in tests/models. The multi-token prediction (MTP) layer is left out, and training does not
update the routers' biases.
"""

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.blocks import GatedMlp
from llmb.models.decoder import (
    ATTENTION_FIELDS,
    Decoder,
    DecoderLayer,
    hf_decoder_names,
    reject_fields,
    rope_config,
)
from llmb.models.mla import MLAAttention, mla_config
from llmb.models.moe import MoE, moe_config

MATRICES = ("gate", "up", "down")
ATTENTION_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
DENSE_NAMES = {f"mlp.{matrix}.weight": f"mlp.{matrix}_proj.weight" for matrix in MATRICES}
MOE_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.{matrix}.weight": f"mlp.experts.{{expert}}.{matrix}_proj.weight" for matrix in MATRICES},
}
SHARED_NAMES = {f"mlp.shared.{matrix}.weight": f"mlp.shared_experts.{matrix}_proj.weight" for matrix in MATRICES}


class DeepSeek(Decoder):
    """DeepSeek network."""

    def __init__(self, model: Model):
        reject_fields(model, "pattern", "mamba", "gated", "post_norms", "attn_logit_softcap", *ATTENTION_FIELDS)
        _check_router(model)
        dense_layers = moe_config(model).dense_layers
        layers = (_layer(model, dense=index < dense_layers) for index in range(model.layers))
        super().__init__(model, layers, mla_config(model).rope_dim)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names; `{expert}` is the index along dimension 0 of ours."""
        experts = moe_config(model)
        moe_names = MOE_NAMES | (SHARED_NAMES if experts.shared else {})
        if experts.score != "sigmoid":
            del moe_names["mlp.router.bias"]

        def layer_names(index: int) -> dict[str, str]:
            return ATTENTION_NAMES | (DENSE_NAMES if index < experts.dense_layers else moe_names)

        return hf_decoder_names(model, layer_names)


def _check_router(model: Model) -> None:
    """Raise a ConfigError for a softmax router with a correction bias, which has no name in files."""
    if moe_config(model).correction_bias:
        raise ConfigError(f"model {model.name}: experts of a {model.architecture} cannot have correction_bias=true")


def _layer(model: Model, dense: bool) -> DecoderLayer:
    mlp = GatedMlp(model.hidden, model.ffn, model.activation) if dense else MoE(model)
    return DecoderLayer(model, MLAAttention(model, rope_config(model)), mlp)
