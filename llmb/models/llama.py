"""Llama and dense decoders like it: their layers are grouped-query attention and a gated MLP.

    network = Llama(model)              # model: a model.Model
    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

Compared with `transformers` in tests/models. Tensor names end in their shape, as in `blocks.py`.
"""

from llmb.config.huggingface.dense_models import DENSE_MODELS
from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention, GatedMlp, PlainMlp
from llmb.models.decoder import Decoder, DecoderLayer, hf_decoder_names, rope_config
from llmb.models.hf_layout import HfLayout, OffsetLayout, rotary_layouts


class LlamaDecoderLayer(DecoderLayer):
    """Grouped-query attention and an MLP, with a gate in most models."""

    attention: Attention
    mlp: GatedMlp | PlainMlp

    def __init__(self, model: Model, kind: str):
        mlp = GatedMlp if model.gated else PlainMlp
        super().__init__(model, Attention(model, kind), mlp(model.hidden, model.ffn, model.activation))


class Llama(Decoder):
    """Llama network."""

    def __init__(self, model: Model):
        _check(model)
        kinds = (model.attention_kind(layer) for layer in range(model.layers))
        super().__init__(model, (LlamaDecoderLayer(model, kind) for kind in kinds), model.head_dim)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names; several of ours may be the rows of one tensor there."""
        names = DENSE_MODELS[model.architecture].layer_names(model)
        return hf_decoder_names(model, lambda _index: names)

    @staticmethod
    def hf_layouts(model: Model) -> dict[str, HfLayout]:
        """Return how norms and partly rotated heads differ in files."""
        dense, layouts = DENSE_MODELS[model.architecture], dict[str, HfLayout]()
        names = Llama.hf_names(model)
        if dense.norm_offset:
            layouts |= {name: OffsetLayout(dense.norm_offset) for name in names if name.endswith("norm.weight")}
        partial = rope_config(model).partial_rotary_factor
        return layouts | rotary_layouts(names, model.head_dim, partial, dense.interleaved_rope)


def _check(model: Model) -> None:
    unsupported = [name for name in ("pattern", "experts", "mla", "mamba") if getattr(model, name) is not None]
    gated = DENSE_MODELS[model.architecture].fields.get("gated", True)
    if unsupported or model.gated != gated:
        fields = ", ".join(unsupported + [f"gated={str(model.gated).lower()}"] * (model.gated != gated))
        mlps = "dense gated MLPs" if gated else "dense MLPs without a gate"
        raise ConfigError(f"model {model.name}: a {model.architecture} has {mlps} and plain attention, not {fields}")
    rope_config(model)
