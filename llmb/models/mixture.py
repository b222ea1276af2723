"""Decoders with a mixture of experts behind grouped-query attention: Mixtral, Qwen3-MoE, gpt-oss, GLM-4.5, MiniMax-M2.

    network = Mixture(model)            # model: a model.Model
    loss = network(tokens_BT, labels_BT)

Each is described as data (`llmb/config/huggingface/mixture_like.py`). Compared with `transformers` in tests/models.
Multi-token prediction (MTP) layers are left out, and training does not update the routers' biases.
"""

from llmb.config.huggingface.mixtures import MIXTURES
from llmb.config.model import Model
from llmb.models.blocks import Attention, GatedMlp
from llmb.models.decoder import (
    ATTENTION_FIELDS,
    Decoder,
    DecoderLayer,
    hf_decoder_names,
    reject_fields,
    rope_config,
)
from llmb.models.hf_layout import ExpertStackLayout, HfLayout, OneRowLayout, rotary_layouts
from llmb.models.moe import MoE, moe_config

# Of gpt-oss: gate and up in turn in one tensor.
STACK_LAYOUTS: dict[str, HfLayout] = {
    "mlp.gate.weight": ExpertStackLayout(0, 2),
    "mlp.gate.bias": ExpertStackLayout(0, 2, transposed=False),
    "mlp.up.weight": ExpertStackLayout(1, 2),
    "mlp.up.bias": ExpertStackLayout(1, 2, transposed=False),
    "mlp.down.weight": ExpertStackLayout(),
    "mlp.down.bias": ExpertStackLayout(transposed=False),
}


class Mixture(Decoder):
    """Network whose layers are grouped-query attention and experts, the first maybe with a dense MLP."""

    def __init__(self, model: Model):
        like = MIXTURES[model.architecture]
        unsupported = [field for field in ATTENTION_FIELDS if field not in like.attention_fields]
        reject_fields(model, "pattern", "mla", "mamba", "gated", "post_norms", "attn_logit_softcap", *unsupported)
        like.check_experts(model)
        rope_config(model)
        dense_layers = moe_config(model).dense_layers
        layers = (
            _layer(model, model.attention_kind(index), dense=index < dense_layers) for index in range(model.layers)
        )
        super().__init__(model, layers, model.head_dim)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names; `{expert}` is the index along dimension 0 of ours."""
        return hf_decoder_names(model, lambda index: MIXTURES[model.architecture].layer_names(model, index))

    @staticmethod
    def hf_layouts(model: Model) -> dict[str, HfLayout]:
        """Return how partly rotated heads and stacked experts differ in files."""
        names = Mixture.hf_names(model)
        like, partial = MIXTURES[model.architecture], rope_config(model).partial_rotary_factor
        layouts = rotary_layouts(names, model.head_dim, partial, like.interleaved_rope)
        if moe_config(model).correction_bias:
            layouts |= {name: OneRowLayout() for name in names if name.endswith("router.bias")}
        if like.has_expert_stacks:
            layouts |= {
                name: layout for name in names for suffix, layout in STACK_LAYOUTS.items() if name.endswith(suffix)
            }
        return layouts


def _layer(model: Model, kind: str, dense: bool) -> DecoderLayer:
    mlp = GatedMlp(model.hidden, model.ffn, model.activation) if dense else MoE(model)
    return DecoderLayer(model, Attention(model, kind), mlp)
