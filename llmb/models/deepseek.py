"""DeepSeek-V3 and R1: a decoder of latent attention and a mixture of experts, whose first layers keep a dense MLP.

    network = DeepSeek(model)           # model: a spec.Model
    loss = network(tokens_BT, labels_BT)

Checked number by number against `transformers` in tests/models. The multi-token-prediction layer is left out, and the
routers' corrections stay as they are loaded: training does not move them.
"""

from torch import Tensor, nn

from llmb.config.spec import Model
from llmb.models.blocks import GatedMlp, RMSNorm
from llmb.models.decoder import Decoder, foreign_stack, refuse_fields, rope_of
from llmb.models.mla import LatentAttention, latent_of
from llmb.models.moe import ExpertMlp, experts_of

MATRICES = ("gate", "up", "down")
ATTENTION_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
DENSE_NAMES = {f"mlp.{one}.weight": f"mlp.{one}_proj.weight" for one in MATRICES}
EXPERT_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.{one}.weight": f"mlp.experts.{{expert}}.{one}_proj.weight" for one in MATRICES},
}
SHARED_NAMES = {f"mlp.shared.{one}.weight": f"mlp.shared_experts.{one}_proj.weight" for one in MATRICES}


class Layer(nn.Module):
    """Latent attention, then the dense MLP or the experts, each on a normed copy of the stream and added to it."""

    def __init__(self, model: Model, dense: bool):
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps)
        self.attention = LatentAttention(model, rope_of(model))
        self.mlp_norm = RMSNorm(model.hidden, model.norm_eps)
        self.mlp = GatedMlp(model.hidden, model.ffn, model.activation) if dense else ExpertMlp(model)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        normed_BTC, x_BTC = self.attention_norm(x_BTC, beside=True)
        x_BTC = x_BTC + self.attention(normed_BTC, cos_TD, sin_TD)
        normed_BTC, x_BTC = self.mlp_norm(x_BTC, beside=True)
        return x_BTC + self.mlp(normed_BTC)


class DeepSeek(Decoder):
    """The whole network."""

    def __init__(self, model: Model):
        refuse_fields(model, "pattern", "mamba", "gated", "post_norms", "attention_cap")
        dense = experts_of(model).dense_layers
        layers = (Layer(model, dense=index < dense) for index in range(model.layers))
        super().__init__(model, layers, latent_of(model).rope_dim)

    @staticmethod
    def foreign_names(model: Model) -> dict[str, str]:
        """Our name -> the Hugging Face name of every tensor; `{expert}` counts along dimension 0 of ours."""
        experts = experts_of(model)
        mixture = EXPERT_NAMES | (SHARED_NAMES if experts.shared else {})
        if experts.score != "sigmoid":
            del mixture["mlp.router.bias"]

        def layer_names(index: int) -> dict[str, str]:
            return ATTENTION_NAMES | (DENSE_NAMES if index < experts.dense_layers else mixture)

        return foreign_stack(model, layer_names)
