"""The blocks that language models are made of: RMSNorm, rotary positions, grouped-query attention, dense MLPs.

Plain torch, one micro-batch at a time. Every block computes in the number format of what it is given, so the same code
runs in fp32 and bf16; it knows nothing of ranks or precision policies, which are applied from outside (`llmb/train`).

Tensor names end in their shape: B sequences, T tokens, C hidden width, H heads, D width of a head.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from llmb.config.spec import Model, Rope
from llmb.errors import ConfigError
from llmb.ops.activation.activation_autograd import (
    ACTIVATIONS as ACTIVATIONS,  # for those who build models' blocks anew
)
from llmb.ops.activation.activation_autograd import activated
from llmb.ops.attention.softcap_attention import capped_attention
from llmb.ops.dispatch import is_dry_run
from llmb.ops.norm.rms_norm_autograd import norm_beside
from llmb.ops.rope.rope_autograd import rotated


class RMSNorm(nn.Module):
    """Scales each token's vector to unit root mean square, then each channel by a learned weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTC: Tensor, beside: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The normed stream; with `beside` also the stream itself, to go around the block: their slopes meet here."""
        normed_BTC, x_BTC = norm_beside(x_BTC, self.weight, self.eps)
        return (normed_BTC, x_BTC) if beside else normed_BTC


def rope_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Radians per token for each of the head_dim / 2 rotated pairs, stretched as `rope.scaling` says.

    `llama3`: pairs that turn often within the original context stay as they are, those that turn seldom are slowed by
    `factor`, and between the two bounds (counted in turns) the slowing sets in linearly.
    `yarn`: likewise, but the slowing sets in linearly over the pairs between the bounds, whole pairs at both ends.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "llama3":
        turns = rope.original_tokens * frequencies / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / rope.factor)
    if rope.scaling == "yarn":
        first = max(math.floor(_pair_with_turns(rope.beta_fast, rope, head_dim)), 0)
        last = min(math.ceil(_pair_with_turns(rope.beta_slow, rope, head_dim)), head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        kept = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / rope.factor)
    return frequencies


def _pair_with_turns(turns: float, rope: Rope, head_dim: int) -> float:
    """Which pair, as a broken number, turns so often within the original context."""
    return head_dim * math.log(rope.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_attention_scale(rope: Rope) -> float:
    """By how much YaRN multiplies the attention's logits; the published models put none of it into cosine and sine."""
    if rope.scaling != "yarn" or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def positions_in_order(tokens: int, device: torch.device) -> Tensor:
    """The positions of a sequence that is whole."""
    return torch.arange(tokens, device=device)


def rope_table(rope: Rope, head_dim: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the positions' angles, [T, head_dim / 2] in fp32; computed once, used by all layers."""
    angles = torch.outer(positions_T.float(), rope_frequencies(rope, head_dim, positions_T.device))
    return angles.cos(), angles.sin()


@cache
def attention_backends(device: torch.device) -> list[SDPBackend]:
    """Which attention kernels to try, best first; torch takes the first that accepts the call.

    The one place where this is decided. On Hopper and later cuDNN runs about 1.7 times as fast as FlashAttention-2.
    """
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        fused.reverse()
    return [*fused, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float | None = None, cap: float | None = None
) -> Tensor:
    """Each token attends to itself and those before it; k and v may have fewer heads, each serving a group of q's.

    Queries may be the last of the tokens only: they stand at the end of the keys, and the last one sees them all.
    The logits are multiplied by `scale`, which is 1 / sqrt(D) unless given, and squeezed to +-cap where there is one.
    """
    if cap is not None:
        return capped_attention(q_BHQD, k_BHTD, v_BHTD, scale or q_BHQD.shape[-1] ** -0.5, cap)
    mask = _last_queries_mask(q_BHQD.shape[2], k_BHTD.shape[2], q_BHQD.device)
    grouped = q_BHQD.shape[1] != k_BHTD.shape[1]
    with sdpa_kernel(attention_backends(q_BHQD.device), set_priority=True):
        return F.scaled_dot_product_attention(
            q_BHQD, k_BHTD, v_BHTD, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )


def _last_queries_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """What tells torch that the queries are the last; none where they are all, which its kernels know by themselves.

    On CUDA it has no memory: it picks FlashAttention-2, whose causal form stands at the end of the keys, or, where the
    values' width is another than the keys', the memory-efficient kernel. cuDNN's stands at their beginning. On CPUs
    there is no such kernel, so the mask is written out.
    """
    if queries == keys or is_dry_run():  # a rehearsal has no numbers, and shall not need memory for a mask
        return None
    if device.type == "cuda":
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions where a table of them is given.

    Head counts are read off the projections' outputs, so that a model split over ranks by heads needs no other code.
    `attend` may be replaced where the tokens of a sequence are on several ranks.
    """

    def __init__(self, model: Model):
        super().__init__()
        if model.heads % model.kv_heads:
            raise ConfigError(f"model {model.name}: kv_heads={model.kv_heads} does not divide heads={model.heads}")
        if model.rope is not None and model.head_dim % 2:
            raise ConfigError(f"model {model.name}: head_dim={model.head_dim} must be even for rotary positions")
        self.head_dim = model.head_dim
        self.cap = model.attention_cap
        self.attend: Callable[..., Tensor] = causal_attention
        self.q = nn.Linear(model.hidden, model.heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.hidden, model.kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.hidden, model.kv_heads * model.head_dim, bias=False)
        self.o = nn.Linear(model.heads * model.head_dim, model.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None) -> Tensor:
        q_BTHD, k_BTHD, v_BTHD = (made_BTA.unflatten(-1, (-1, self.head_dim)) for made_BTA in self.projected(x_BTC))
        if cos_TD is not None and sin_TD is not None:
            q_BTHD, k_BTHD = rotated(q_BTHD, cos_TD, sin_TD), rotated(k_BTHD, cos_TD, sin_TD)
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
        mixed_BHTD = self.attend(q_BHTD, k_BHTD, v_BHTD, cap=self.cap)
        return self.o(mixed_BHTD.transpose(1, 2).flatten(2))

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, for a precision pass to make at once."""
        return self.q(x_BTC), self.k(x_BTC), self.v(x_BTC)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu."""

    def __init__(self, hidden: int, ffn: int, activation: str = "silu"):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.activation = activation

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(activated(self.gate(x_BTC), self.activation, self.up(x_BTC)))


class PlainMlp(nn.Module):
    """down(activation(up(x))), without a gate."""

    def __init__(self, hidden: int, ffn: int, activation: str):
        super().__init__()
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.activation = activation

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(activated(self.up(x_BTC), self.activation))
