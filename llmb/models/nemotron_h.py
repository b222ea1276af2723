"""Nemotron-H: a decoder of which each layer is one block: a Mamba-2 mixer, attention or an MLP.

    network = NemotronH(model)          # model: a spec.Model with a pattern such as "M-M*-"
    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

Attention knows no positions: the Mamba layers before it see the order of tokens. Checked number by number against
`transformers` in tests/models. Tensor names end in their shape, as in `blocks.py`.
"""

import torch
from torch import Tensor, nn

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention, PlainMlp, RMSNorm
from llmb.models.decoder import Decoder, refuse_fields
from llmb.models.hf_row_order import RowOrder
from llmb.models.mamba2 import MambaMixer, conv_sections, fill_recurrence, inward_sections, mamba_of

# Our name -> the Hugging Face name inside the block that each letter of the pattern names.
MIXER_NAMES = {
    "M": {
        "inward.weight": "in_proj.weight",
        "conv_weight": "conv1d.weight",
        "conv_bias": "conv1d.bias",
        "dt_bias": "dt_bias",
        "a_log": "A_log",
        "d": "D",
        "norm.weight": "norm.weight",
        "outward.weight": "out_proj.weight",
    },
    "*": {f"{one}.weight": f"{one}_proj.weight" for one in "qkvo"},
    "-": {f"{one}.weight": f"{one}_proj.weight" for one in ("up", "down")},
}


class Layer(nn.Module):
    """One block of the kind that the pattern's letter names, on a normed copy of the stream and added to it."""

    def __init__(self, model: Model, kind: str):
        super().__init__()
        self.norm = RMSNorm(model.hidden, model.norm_eps)
        self.mixer: nn.Module
        if kind == "M":
            self.mixer = MambaMixer(model)
        elif kind == "*":
            self.mixer = Attention(model)
        else:
            self.mixer = PlainMlp(model.hidden, model.ffn, model.activation)

    def forward(self, x_BTC: Tensor) -> Tensor:
        normed_BTC, x_BTC = self.norm(x_BTC, beside=True)
        return x_BTC + self.mixer(normed_BTC)


class NemotronH(Decoder):
    """The whole network."""

    def __init__(self, model: Model):
        pattern = _checked_pattern(model)
        super().__init__(model, (Layer(model, kind) for kind in pattern), rotated=0)

    writes_stream = (".o.weight", ".down.weight", ".outward.weight")

    @property
    def stream_writes(self) -> int:
        """A layer writes into the stream once, not twice."""
        return self.model.layers

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """As every decoder; recurrences start their own way."""
        kind = name.rpartition(".")[2]
        if self.model.mamba is None or not fill_recurrence(kind, parameter, generator, mamba_of(self.model)):
            super().fill(name, parameter, generator)

    @staticmethod
    def foreign_names(model: Model) -> dict[str, str]:
        """Our name -> the Hugging Face name of every tensor."""
        names = {
            "embedding.weight": "model.embeddings.weight",
            "norm.weight": "model.norm_f.weight",
            "head.weight": "lm_head.weight",
        }
        for index, kind in enumerate(_checked_pattern(model)):
            layer = f"layers.{index}"
            names[f"{layer}.norm.weight"] = f"model.{layer}.norm.weight"
            inside = MIXER_NAMES[kind]
            names |= {f"{layer}.mixer.{ours}": f"model.{layer}.mixer.{theirs}" for ours, theirs in inside.items()}
        return names

    @staticmethod
    def foreign_orders(model: Model) -> dict[str, RowOrder]:
        """Mamba mixers lie group after group here."""
        orders: dict[str, RowOrder] = {}
        for index, kind in enumerate(_checked_pattern(model)):
            if kind == "M":
                shape, mixer = mamba_of(model), f"layers.{index}.mixer"
                orders[f"{mixer}.inward.weight"] = RowOrder(shape.groups, inward_sections(shape))
                convolved = RowOrder(shape.groups, conv_sections(shape))
                orders |= dict.fromkeys((f"{mixer}.conv_weight", f"{mixer}.conv_bias"), convolved)
        return orders


def _checked_pattern(model: Model) -> str:
    """The letters of the stack, one a layer, of a model that this network is."""
    pattern = model.pattern or ""
    if len(pattern) != model.layers or set(pattern) - MIXER_NAMES.keys():
        raise ConfigError(
            f"model {model.name}: the pattern must be {model.layers} letters of M (Mamba), * (attention) and - (MLP), "
            f"got {model.pattern!r}"
        )
    if model.rope is not None or model.gated:
        raise ConfigError(f"model {model.name}: a nemotron_h needs rope: null and gated: false")
    refuse_fields(model, "experts", "latent", "tied_embeddings", "post_norms", "attention_cap")
    if "*" in pattern and model.heads % model.kv_heads:
        raise ConfigError(f"model {model.name}: kv_heads={model.kv_heads} does not divide heads={model.heads}")
    return pattern
