"""gpt-oss: experts with biases and a clamped SwiGLU, sliding windows in every other layer, attention sinks.

    network = GptOss(model)             # model: a model.Model
    loss = network(tokens_BT, labels_BT)

Compared with `transformers` in tests/models. What sets it apart:
- attention alternates between a window of 128 tokens and all; each head has a sink, a logit without a value;
- YaRN, whose factor on cosine and sine is `attention_scale` here: squared, as it is on queries and keys;
- biases of all projections, of the router and of the experts, whose activation is `swigluoai`;
- files hold the experts of a layer as one tensor, gate and up in turn, published as MXFP4 (`hf_layout.py`).
"""

from llmb.config.model import Model
from llmb.models.decoder import hf_decoder_names
from llmb.models.hf_layout import ExpertStackLayout, HfLayout
from llmb.models.mixtral import ATTENTION_NAMES, Mixtral

BIAS_NAMES = {f"attention.{projection}_bias": f"self_attn.{projection}_proj.bias" for projection in "qkvo"}
MOE_NAMES = {
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.logit_bias": "mlp.router.bias",
    "mlp.gate.weight": "mlp.experts.gate_up_proj",
    "mlp.gate.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.up.weight": "mlp.experts.gate_up_proj",
    "mlp.up.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.down.weight": "mlp.experts.down_proj",
    "mlp.down.bias": "mlp.experts.down_proj_bias",
}
LAYER_NAMES = ATTENTION_NAMES | BIAS_NAMES | {"attention.sinks": "self_attn.sinks"} | MOE_NAMES
LAYER_LAYOUTS: dict[str, HfLayout] = {
    "mlp.gate.weight": ExpertStackLayout(0, 2),
    "mlp.gate.bias": ExpertStackLayout(0, 2, transposed=False),
    "mlp.up.weight": ExpertStackLayout(1, 2),
    "mlp.up.bias": ExpertStackLayout(1, 2, transposed=False),
    "mlp.down.weight": ExpertStackLayout(),
    "mlp.down.bias": ExpertStackLayout(transposed=False),
}


class GptOss(Mixtral):
    """gpt-oss network."""

    attention_fields = ("qkv_bias", "o_bias", "attention_pattern", "window", "attention_scale", "attention_sinks")
    expert_bias = True

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names; gate and up are parts of one tensor there."""
        names = {name: hf_name for name, hf_name in LAYER_NAMES.items() if _has(model, name)}
        return hf_decoder_names(model, lambda _index: names)

    @staticmethod
    def hf_layouts(model: Model) -> dict[str, HfLayout]:
        """Return the layouts of the experts' tensors."""
        layers = range(model.layers)
        return {f"layers.{index}.{name}": layout for index in layers for name, layout in LAYER_LAYOUTS.items()}


def _has(model: Model, name: str) -> bool:
    """Return whether a model has a tensor; attention may lack biases and sinks."""
    if name == "attention.sinks":
        return model.attention_sinks
    if name in BIAS_NAMES:
        return model.o_bias if name == "attention.o_bias" else model.qkv_bias
    return True
