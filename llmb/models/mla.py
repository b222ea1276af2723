"""Multi-head latent attention (MLA): low-rank projections of queries, keys and values.

A token's keys and values of all heads are kv_up of one latent of kv_rank channels, and all heads share one RoPE key.
Here, for whole sequences, they are expanded. For decoding only the latent and the RoPE key need to be cached: kv_up's
weight, as [heads, nope + value, kv_rank], can be absorbed into the query and the output.

Shapes: B sequences, T tokens, C hidden width, H heads, D head dim (without and with RoPE), R latent ranks.
"""

from collections.abc import Callable

from torch import Tensor, nn

from llmb.config.model import MlaConfig, Model, RopeConfig
from llmb.errors import ConfigError
from llmb.models.blocks import RMSNorm, causal_attention, yarn_attention_scale
from llmb.ops.rope.mla_rope import mla_rope_keys, mla_rope_queries

MLA_NORM_EPS = 1e-6  # of every published DeepSeek, whatever norm_eps is


class MLAAttention(nn.Module):
    """Multi-head latent attention, expanded.

    Head counts follow from the projections' outputs, so tensor parallelism needs no other code. Context parallelism
    replaces `attend`.
    """

    def __init__(self, model: Model, rope: RopeConfig):
        super().__init__()
        sizes = self.sizes = mla_config(model)
        qk_dim = sizes.nope_dim + sizes.rope_dim
        self.scale = qk_dim**-0.5 * yarn_attention_scale(rope)
        self.attend: Callable[..., Tensor] = causal_attention
        self.q_down = nn.Linear(model.hidden, sizes.q_rank, bias=False)
        self.q_norm = RMSNorm(sizes.q_rank, MLA_NORM_EPS)
        self.q_up = nn.Linear(sizes.q_rank, model.heads * qk_dim, bias=False)
        self.kv_down = nn.Linear(model.hidden, sizes.kv_rank + sizes.rope_dim, bias=False)  # the latent, the rope key
        self.kv_norm = RMSNorm(sizes.kv_rank, MLA_NORM_EPS)
        self.kv_up = nn.Linear(sizes.kv_rank, model.heads * (sizes.nope_dim + sizes.value_dim), bias=False)
        self.o = nn.Linear(model.heads * sizes.value_dim, model.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        nope, rope, value = self.sizes.nope_dim, self.sizes.rope_dim, self.sizes.value_dim
        q_BTHD = self.q_up(self.q_norm(self.q_down(x_BTC))).unflatten(-1, (-1, nope + rope))
        latent_BTR, key_BTR = self.kv_down(x_BTC).split((self.sizes.kv_rank, rope), dim=-1)
        kv_BTHD = self.kv_up(self.kv_norm(latent_BTR)).unflatten(-1, (-1, nope + value))
        q_BTHD = mla_rope_queries(q_BTHD, cos_TD, sin_TD)
        k_BTHD, v_BTHD = mla_rope_keys(kv_BTHD, key_BTR, cos_TD, sin_TD, nope)
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
        out_BHTD = self.attend(q_BHTD, k_BHTD, v_BHTD, scale=self.scale)
        return self.o(out_BHTD.transpose(1, 2).flatten(2))


def mla_config(model: Model) -> MlaConfig:
    """Return the validated MLA settings of a model, or raise a ConfigError."""
    if model.mla is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field mla")
    if model.mla.rope_dim % 2:
        raise ConfigError(f"model {model.name}: rope_dim={model.mla.rope_dim} must be even for RoPE")
    return model.mla
