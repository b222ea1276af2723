"""Multi-head latent attention (MLA): queries, keys and values pass through narrow latents.

A token's keys and values of all heads are kv_up of one latent of kv_rank channels, and all heads share one rotated key.
Here, where whole sequences are computed, they are expanded. To generate tokens only the latent and the rotated key need
to be kept: kv_up's weight, seen as [heads, nope + value, kv_rank], can be absorbed into the query and the output.

Shapes: B sequences, T tokens, C hidden width, H heads, D width of a head (N without position, R with), R latent ranks.
"""

from collections.abc import Callable

from torch import Tensor, nn

from llmb.config.spec import Latent, Model, Rope
from llmb.errors import ConfigError
from llmb.models.blocks import RMSNorm, causal_attention, yarn_attention_scale
from llmb.ops.rope.mla_rope import latent_keys, latent_queries

LATENT_NORM_EPS = 1e-6  # of every published DeepSeek, whatever the eps of the other norms


class LatentAttention(nn.Module):
    """Head counts are read off the projections' outputs, so that a split by heads needs no other code.

    `attend` may be replaced where the tokens of a sequence are on several ranks.
    """

    def __init__(self, model: Model, rope: Rope):
        super().__init__()
        latent = self.latent = latent_of(model)
        key = latent.nope_dim + latent.rope_dim
        self.scale = key**-0.5 * yarn_attention_scale(rope)
        self.attend: Callable[..., Tensor] = causal_attention
        self.q_down = nn.Linear(model.hidden, latent.q_rank, bias=False)
        self.q_norm = RMSNorm(latent.q_rank, LATENT_NORM_EPS)
        self.q_up = nn.Linear(latent.q_rank, model.heads * key, bias=False)
        self.kv_down = nn.Linear(model.hidden, latent.kv_rank + latent.rope_dim, bias=False)  # the latent, the rope key
        self.kv_norm = RMSNorm(latent.kv_rank, LATENT_NORM_EPS)
        self.kv_up = nn.Linear(latent.kv_rank, model.heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.o = nn.Linear(model.heads * latent.value_dim, model.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        nope, rope, value = self.latent.nope_dim, self.latent.rope_dim, self.latent.value_dim
        q_BTHD = self.q_up(self.q_norm(self.q_down(x_BTC))).unflatten(-1, (-1, nope + rope))
        latent_BTR, key_BTR = self.kv_down(x_BTC).split((self.latent.kv_rank, rope), dim=-1)
        kv_BTHD = self.kv_up(self.kv_norm(latent_BTR)).unflatten(-1, (-1, nope + value))
        q_BTHD = latent_queries(q_BTHD, cos_TD, sin_TD)
        k_BTHD, v_BTHD = latent_keys(kv_BTHD, key_BTR, cos_TD, sin_TD, nope)
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
        mixed_BHTD = self.attend(q_BHTD, k_BHTD, v_BHTD, scale=self.scale)
        return self.o(mixed_BHTD.transpose(1, 2).flatten(2))


def latent_of(model: Model) -> Latent:
    """The model's latent sizes, or a ConfigError."""
    if model.latent is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field latent")
    if model.latent.rope_dim % 2:
        raise ConfigError(f"model {model.name}: rope_dim={model.latent.rope_dim} must be even for rotary positions")
    return model.latent
