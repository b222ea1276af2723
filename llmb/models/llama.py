"""Llama 3.x: a decoder whose layers are grouped-query attention and a gated MLP.

    network = Llama(model)              # model: a spec.Model
    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

Compared with `transformers` in tests/models. Tensor names end in their shape, as in `blocks.py`.
"""

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention, GatedMlp
from llmb.models.decoder import Decoder, DecoderLayer, hf_decoder_names, rope_config

LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{projection}.weight": f"self_attn.{projection}_proj.weight" for projection in "qkvo"},
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"mlp.{projection}.weight": f"mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")},
}


class LlamaDecoderLayer(DecoderLayer):
    """Grouped-query attention and gated MLP."""

    attention: Attention
    mlp: GatedMlp

    def __init__(self, model: Model, kind: str):
        super().__init__(model, Attention(model, kind), GatedMlp(model.hidden, model.ffn, model.activation))


class Llama(Decoder):
    """Llama network."""

    def __init__(self, model: Model):
        _check(model)
        kinds = (model.attention_kind(layer) for layer in range(model.layers))
        super().__init__(model, (LlamaDecoderLayer(model, kind) for kind in kinds), model.head_dim)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names."""
        return hf_decoder_names(model, lambda _index: LAYER_NAMES)


def _check(model: Model) -> None:
    unsupported = [name for name in ("pattern", "experts", "mla", "mamba") if getattr(model, name) is not None]
    if unsupported or not model.gated:
        fields = ", ".join(unsupported + ["gated=false"] * (not model.gated))
        raise ConfigError(f"model {model.name}: a llama has dense gated MLPs and plain attention, not {fields}")
    if rope_config(model).scaling == "yarn":
        raise ConfigError(
            f"model {model.name}: rope scaling 'yarn' of a llama is not supported; choices are: none, llama3"
        )
