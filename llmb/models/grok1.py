"""Grok-1, as published by xAI: grouped-query attention with logit softcap and 8 experts, with pre- and post-norms.

    network = Grok1(model)              # model: a model.Model
    loss = network(tokens_BT, labels_BT)

Differences of the published code from the other decoders:
- the embedding is multiplied by sqrt(6144), the logits by 1 / sqrt(3), and one matrix serves both ends;
- attention logits are 30 * tanh(q k / sqrt(128) / 30), RoPE covers the whole head, in halves (not interleaved);
- the router is a softmax over all experts in fp32; the top two weights are not renormalized;
- experts are GeGLU with the tanh form of gelu;
- outputs of attention and experts are normed before the residual add.
All of these are fields of model.Model; the published values are in the recipe.
"""

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention
from llmb.models.decoder import ATTENTION_FIELDS, Decoder, DecoderLayer, hf_decoder_names, reject_fields, rope_config
from llmb.models.moe import MoE, moe_config

# There is no Hugging Face layout for Grok-1: these names are analogous to the others.
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{projection}.weight": f"self_attn.{projection}_proj.weight" for projection in "qkvo"},
    "mlp_norm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    **{
        f"mlp.{projection}.weight": f"mlp.experts.{{expert}}.{projection}_proj.weight"
        for projection in ("gate", "up", "down")
    },
}
POST_NORM_NAMES = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_mlp_layernorm.weight",
}


class Grok1(Decoder):
    """Grok-1 network."""

    def __init__(self, model: Model):
        reject_fields(model, "pattern", "mla", "mamba", "gated", *ATTENTION_FIELDS)
        _check(model)
        layers = (DecoderLayer(model, Attention(model), MoE(model)) for _ in range(model.layers))
        super().__init__(model, layers, model.head_dim)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face style names; `{expert}` is the index along dimension 0 of ours."""
        names = LAYER_NAMES | (POST_NORM_NAMES if model.post_norms else {})
        return hf_decoder_names(model, lambda _index: names)


def _check(model: Model) -> None:
    """Raise a ConfigError unless every layer has softmax-routed experts and no dense or shared MLP."""
    experts = moe_config(model)
    unsupported = {
        f"dense_layers={experts.dense_layers}": experts.dense_layers,
        f"shared={experts.shared}": experts.shared,
        f"score={experts.score}": experts.score != "softmax",
        "correction_bias=true": experts.correction_bias,
    }
    errors = [field for field, is_set in unsupported.items() if is_set]
    if errors:
        raise ConfigError(f"model {model.name}: a grok1 cannot have {', '.join(errors)}")
    if rope_config(model).scaling != "none":
        raise ConfigError(f"model {model.name}: rope scaling of a grok1 is not supported; the only choice is: none")
