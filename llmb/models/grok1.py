"""Grok-1, as published by xAI: grouped-query attention with capped logits and 8 experts, both normed before and after.

    network = Grok1(model)              # model: a spec.Model
    loss = network(tokens_BT, labels_BT)

What the published code computes, beyond what every decoder here does:
- the embedding is multiplied by sqrt(6144), the logits by 1 / sqrt(3), and one matrix serves both ends;
- attention logits are 30 * tanh(q k / sqrt(128) / 30), the rotation is over the whole head, in halves;
- the router is a softmax over all experts in fp32; the two largest weigh as they are, not made to sum to 1;
- experts are GeGLU with the tanh form of gelu;
- what attention and experts add to the stream is normed once more.
All of these are fields of spec.Model; the published values are in the recipe.
"""

from torch import Tensor, nn

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.blocks import Attention, RMSNorm
from llmb.models.decoder import Decoder, foreign_stack, refuse_fields, rope_of
from llmb.models.moe import ExpertMlp, experts_of

# There is no Hugging Face layout for Grok-1: these follow the names of the others.
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{one}.weight": f"self_attn.{one}_proj.weight" for one in "qkvo"},
    "mlp_norm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    **{f"mlp.{one}.weight": f"mlp.experts.{{expert}}.{one}_proj.weight" for one in ("gate", "up", "down")},
}
POST_NORM_NAMES = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_mlp_layernorm.weight",
}


class Layer(nn.Module):
    """Attention, then the experts, each on a normed copy of the stream, normed again and added to it."""

    def __init__(self, model: Model):
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.attention_post_norm = _post_norm(model)
        self.mlp_norm = RMSNorm(model.hidden, model.norm_eps)
        self.mlp = ExpertMlp(model)
        self.mlp_post_norm = _post_norm(model)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        normed_BTC, x_BTC = self.attention_norm(x_BTC, beside=True)
        x_BTC = x_BTC + self.attention_post_norm(self.attention(normed_BTC, cos_TD, sin_TD))
        normed_BTC, x_BTC = self.mlp_norm(x_BTC, beside=True)
        return x_BTC + self.mlp_post_norm(self.mlp(normed_BTC))


class Grok1(Decoder):
    """The whole network."""

    def __init__(self, model: Model):
        refuse_fields(model, "pattern", "latent", "mamba", "gated")
        _check(model)
        super().__init__(model, (Layer(model) for _ in range(model.layers)), model.head_dim)

    @staticmethod
    def foreign_names(model: Model) -> dict[str, str]:
        """Our name -> a name in the manner of Hugging Face; `{expert}` counts along dimension 0 of ours."""
        names = LAYER_NAMES | (POST_NORM_NAMES if model.post_norms else {})
        return foreign_stack(model, lambda _index: names)


def _check(model: Model) -> None:
    """Every layer of a Grok-1 has softmax-routed experts and no dense or shared MLP."""
    experts = experts_of(model)
    wrong = {
        f"dense_layers={experts.dense_layers}": experts.dense_layers,
        f"shared={experts.shared}": experts.shared,
        f"score={experts.score}": experts.score != "softmax",
    }
    refused = [what for what, asked in wrong.items() if asked]
    if refused:
        raise ConfigError(f"model {model.name}: a grok1 cannot have {', '.join(refused)}")
    if rope_of(model).scaling != "none":
        raise ConfigError(f"model {model.name}: rope scaling of a grok1 is not built; the choice is: none")


def _post_norm(model: Model) -> nn.Module:
    return RMSNorm(model.hidden, model.norm_eps) if model.post_norms else nn.Identity()
