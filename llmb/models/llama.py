"""Llama 3.x: a decoder whose layers are grouped-query attention and a gated MLP.

    network = Llama(model)              # model: a spec.Model
    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

Checked number by number against `transformers` in tests/models. Tensor names end in their shape, as in `blocks.py`.
"""

from torch import Tensor, nn

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention, GatedMlp, RMSNorm
from llmb.models.decoder import Decoder, foreign_stack, refuse_fields, rope_of

LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{one}.weight": f"self_attn.{one}_proj.weight" for one in "qkvo"},
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"mlp.{one}.weight": f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")},
}


class Layer(nn.Module):
    """Attention, then the MLP, each on a normed copy of the stream and added to it."""

    def __init__(self, model: Model):
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = RMSNorm(model.hidden, model.norm_eps)
        self.mlp = GatedMlp(model.hidden, model.ffn, model.activation)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        normed_BTC, x_BTC = self.attention_norm(x_BTC, beside=True)
        x_BTC = x_BTC + self.attention(normed_BTC, cos_TD, sin_TD)
        normed_BTC, x_BTC = self.mlp_norm(x_BTC, beside=True)
        return x_BTC + self.mlp(normed_BTC)


class Llama(Decoder):
    """The whole network."""

    def __init__(self, model: Model):
        _check(model)
        super().__init__(model, (Layer(model) for _ in range(model.layers)), model.head_dim)

    @staticmethod
    def foreign_names(model: Model) -> dict[str, str]:
        """Our name -> the Hugging Face name of every tensor."""
        return foreign_stack(model, lambda _index: LAYER_NAMES)


def _check(model: Model) -> None:
    foreign = [name for name in ("pattern", "experts", "latent", "mamba") if getattr(model, name) is not None]
    if foreign or not model.gated:
        wrong = ", ".join(foreign + ["gated=false"] * (not model.gated))
        raise ConfigError(f"model {model.name}: a llama has dense gated MLPs and plain attention, not {wrong}")
    refuse_fields(model, "post_norms")
    if rope_of(model).scaling == "yarn":
        raise ConfigError(f"model {model.name}: rope scaling 'yarn' of a llama is not built; choices are: none, llama3")
