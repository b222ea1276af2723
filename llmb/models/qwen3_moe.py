"""Qwen3-MoE: a mixture of experts in every layer, queries and keys with a norm of each head.

    network = Qwen3Moe(model)           # model: a model.Model
    loss = network(tokens_BT, labels_BT)

Compared with `transformers` in tests/models. Layers with a dense MLP (decoder_sparse_step, mlp_only_layers), which no
published model has, are refused.
"""

from llmb.config.model import Model
from llmb.models.decoder import hf_decoder_names
from llmb.models.mixtral import ATTENTION_NAMES, Mixtral

QK_NORM_NAMES = {f"attention.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
MOE_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    **{f"mlp.{matrix}.weight": f"mlp.experts.{{expert}}.{matrix}_proj.weight" for matrix in ("gate", "up", "down")},
}


class Qwen3Moe(Mixtral):
    """Qwen3-MoE network."""

    attention_fields = ("qk_norm",)

    @staticmethod
    def hf_names(model: Model) -> dict[str, str]:
        """Map our names to Hugging Face names; `{expert}` is the index along dimension 0 of ours."""
        names = ATTENTION_NAMES | (QK_NORM_NAMES if model.qk_norm else {}) | MOE_NAMES
        return hf_decoder_names(model, lambda _index: names)
