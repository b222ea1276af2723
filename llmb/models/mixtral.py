"""Mixtral: a Llama whose MLPs are mixtures of experts, chosen by a softmax over the best few.

    network = Mixtral(model)            # model: a model.Model
    loss = network(tokens_BT, labels_BT)

Compared with `transformers` in tests/models.
"""

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention
from llmb.models.decoder import (
    ATTENTION_FIELDS,
    Decoder,
    DecoderLayer,
    hf_decoder_names,
    reject_fields,
    rope_config,
)
from llmb.models.moe import MoE, moe_config

ATTENTION_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{projection}.weight": f"self_attn.{projection}_proj.weight" for projection in "qkvo"},
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
MOE_NAMES = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    **{
        f"mlp.{matrix}.weight": f"block_sparse_moe.experts.{{expert}}.{hf_name}.weight"
        for matrix, hf_name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}


class Mixtral(Decoder):
    """Mixtral network, and the base of others whose layers are grouped-query attention and experts only."""

    attention_fields: tuple[str, ...] = ("attention_pattern", "window")  # of ATTENTION_FIELDS, those that it may have
    expert_bias = False

    def __init__(self, model: Model):
        unsupported = [field for field in ATTENTION_FIELDS if field not in self.attention_fields]
        reject_fields(model, "pattern", "mla", "mamba", "gated", "post_norms", "attn_logit_softcap", *unsupported)
        _check_experts(model, self.expert_bias)
        layers = (_layer(model, model.attention_kind(index)) for index in range(model.layers))
        super().__init__(model, layers, model.head_dim)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names; `{expert}` is the index along dimension 0 of ours."""
        return hf_decoder_names(model, lambda _index: ATTENTION_NAMES | MOE_NAMES)


def _layer(model: Model, kind: str) -> DecoderLayer:
    return DecoderLayer(model, Attention(model, kind), MoE(model))


def _check_experts(model: Model, bias: bool) -> None:
    """Raise a ConfigError unless every layer has softmax-routed experts and no dense or shared MLP."""
    experts = moe_config(model)
    unsupported = {
        f"dense_layers={experts.dense_layers}": experts.dense_layers,
        f"shared={experts.shared}": experts.shared,
        f"groups={experts.groups}": experts.groups != 1,
        f"score={experts.score}": experts.score != "softmax",
        f"scale={experts.scale:g}": experts.scale != 1.0,
        f"bias={str(experts.bias).lower()}": experts.bias != bias,
    }
    errors = [field for field, is_set in unsupported.items() if is_set]
    if errors:
        raise ConfigError(f"model {model.name}: experts of a {model.architecture} cannot have {', '.join(errors)}")
    rope_config(model)
