"""Nemotron-H: a hybrid decoder whose layers are Mamba-2 mixers, attention or MLPs.

    network = NemotronH(model)          # model: a model.Model with a pattern such as "M-M*-"
    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

Attention has no positional embedding: the Mamba layers before it see the order of tokens. Compared with `transformers`
in tests/models. Tensor names end in their shape, as in `blocks.py`.
"""

import torch
from torch import Tensor, nn

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention, PlainMlp, RMSNorm
from llmb.models.decoder import ATTENTION_FIELDS, Decoder, reject_fields
from llmb.models.hf_layout import GroupedRowLayout, HfLayout
from llmb.models.mamba2 import MambaMixer, conv_sections, in_proj_sections, init_mamba_parameter, mamba_config

# Our name -> Hugging Face name of the tensors of a mixer, by the letter in the pattern.
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
    "*": {f"{projection}.weight": f"{projection}_proj.weight" for projection in "qkvo"},
    "-": {f"{projection}.weight": f"{projection}_proj.weight" for projection in ("up", "down")},
}


class NemotronHDecoderLayer(nn.Module):
    """One mixer, chosen by the letter of the pattern, with pre-norm and residual."""

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
        normed_BTC, x_BTC = self.norm(x_BTC, with_residual=True)
        return x_BTC + self.mixer(normed_BTC)


class NemotronH(Decoder):
    """Nemotron-H network."""

    def __init__(self, model: Model):
        pattern = _validated_pattern(model)
        super().__init__(model, (NemotronHDecoderLayer(model, kind) for kind in pattern), rope_dim=0)

    residual_projections = (".o.weight", ".down.weight", ".outward.weight")

    @property
    def residual_adds(self) -> int:
        """One add per layer instead of two."""
        return self.model.layers

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialize one unsharded parameter; those of Mamba mixers in their own way."""
        kind = name.rpartition(".")[2]
        if self.model.mamba is None or not init_mamba_parameter(kind, parameter, generator, mamba_config(self.model)):
            super().init_parameter(name, parameter, generator)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names."""
        names = {
            "embedding.weight": "model.embeddings.weight",
            "norm.weight": "model.norm_f.weight",
            "head.weight": "lm_head.weight",
        }
        for index, kind in enumerate(_validated_pattern(model)):
            layer = f"layers.{index}"
            names[f"{layer}.norm.weight"] = f"model.{layer}.norm.weight"
            for name, hf_name in MIXER_NAMES[kind].items():
                names[f"{layer}.mixer.{name}"] = f"model.{layer}.mixer.{hf_name}"
        return names

    @staticmethod
    def hf_layouts(model: Model) -> dict[str, HfLayout]:
        """Return the row layouts of Mamba mixers, which are grouped here."""
        layouts: dict[str, HfLayout] = {}
        for index, kind in enumerate(_validated_pattern(model)):
            if kind == "M":
                settings, mixer = mamba_config(model), f"layers.{index}.mixer"
                layouts[f"{mixer}.inward.weight"] = GroupedRowLayout(settings.groups, in_proj_sections(settings))
                conv_layout = GroupedRowLayout(settings.groups, conv_sections(settings))
                layouts |= dict.fromkeys((f"{mixer}.conv_weight", f"{mixer}.conv_bias"), conv_layout)
        return layouts


def _validated_pattern(model: Model) -> str:
    """Return the pattern of a model, one letter per layer, or raise a ConfigError."""
    pattern = model.pattern or ""
    if len(pattern) != model.layers or set(pattern) - MIXER_NAMES.keys():
        raise ConfigError(
            f"model {model.name}: the pattern must be {model.layers} letters of M (Mamba), * (attention) and - (MLP), "
            f"got {model.pattern!r}"
        )
    if model.rope is not None or model.gated:
        raise ConfigError(f"model {model.name}: a nemotron_h needs rope: null and gated: false")
    reject_fields(model, "experts", "mla", "tied_embeddings", "post_norms", "attn_logit_softcap", *ATTENTION_FIELDS)
    if "*" in pattern and model.heads % model.kv_heads:
        raise ConfigError(f"model {model.name}: kv_heads={model.kv_heads} does not divide heads={model.heads}")
    return pattern
