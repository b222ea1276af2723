"""Building blocks of language models: RMSNorm, RoPE, grouped-query attention, dense MLPs.

Plain torch, one micro-batch at a time. Every block computes in the dtype of its input, so the same code runs in fp32
and bf16; parallelism and precision are applied from outside (`llmb/train`).

Tensor names end in their shape: B sequences, T tokens, C hidden width, H heads, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.config.model import ATTENTION_KINDS, Model, RopeConfig
from llmb.errors import ConfigError
from llmb.ops.activation.activation_autograd import fused_activation
from llmb.ops.attention.window_attention import window_attention
from llmb.ops.device_capabilities import capabilities
from llmb.ops.norm.rms_norm_autograd import rms_norm_and_add, rms_norm_with_residual
from llmb.ops.rope.rope_autograd import fused_rope
from llmb.ops.softcap.softcap_attention import softcap_attention


class RMSNorm(nn.Module):
    """Root mean square norm over the channels with a learned weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(
        self, x_BTC: Tensor, with_residual: bool = False, residual_BTC: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normed x, added to a residual if given.

        `with_residual` also returns x itself, whose gradient is then added in the norm's backward.
        """
        if residual_BTC is not None:
            return rms_norm_and_add(x_BTC, self.weight, self.eps, residual_BTC)
        normed_BTC, x_BTC = rms_norm_with_residual(x_BTC, self.weight, self.eps)
        return (normed_BTC, x_BTC) if with_residual else normed_BTC


class TokenEmbedding(nn.Embedding):
    """Embedding of tokens."""

    def reset_parameters(self) -> None:
        """Draw initial weights; on the meta device torch would import its compiler, for two seconds, to draw none."""
        if not self.weight.is_meta:
            super().reset_parameters()


def rope_frequencies(rope: RopeConfig, head_dim: int, device: torch.device, context_tokens: int = 0) -> Tensor:
    """Return the angular frequency of each of the head_dim / 2 rotated pairs, in radians per token, scaled.

    `llama3`: pairs with many rotations within the original context are unscaled, those with few are divided by
    `factor`, with a linear blend between the two bounds (in rotations).
    `yarn`: likewise, but the blend is linear over the index of the pairs, from whole pairs at both bounds.
    `linear`: all pairs are divided by `factor`.
    `longrope`: each pair is divided by its own number, another one if a run has sequences beyond the original context
    (`context_tokens`: the longest).
    """
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    if rotary_dim < head_dim:  # the other pairs do not rotate: see `hf_layout.RotaryLayout`
        whole = rope_frequencies(replace(rope, partial_rotary_factor=1.0), rotary_dim, device, context_tokens)
        return F.pad(whole, (0, (head_dim - rotary_dim) // 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "longrope":
        factors = rope.long_factors if context_tokens > rope.original_tokens else rope.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32, device=device)
    if rope.scaling == "llama3":
        rotations = rope.original_tokens * frequencies / (2 * math.pi)
        unscaled = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / rope.factor)
    if rope.scaling == "yarn":
        first, last = (_pair_with_rotations(beta, rope, head_dim) for beta in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        unscaled = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / rope.factor)
    return frequencies


def _pair_with_rotations(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the fractional index of the pair with so many rotations within the original context."""
    return head_dim * math.log(rope.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_attention_scale(rope: RopeConfig) -> float:
    """Return YaRN's factor of the attention logits; the published models put none of it into cosine and sine."""
    if rope.scaling != "yarn" or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def sequential_positions(tokens: int, device: torch.device) -> Tensor:
    """Return the positions of an unsharded sequence."""
    return torch.arange(tokens, device=device)


class RotaryPairs(NamedTuple):
    """Rotary embedding of each of the head_dim / 2 pairs."""

    frequencies_D: Tensor  # radians per token
    factors_D: Tensor | None  # of cosine and sine; none: 1

    @classmethod
    def of(cls, rope: RopeConfig, head_dim: int, device: torch.device, context_tokens: int = 0) -> "RotaryPairs":
        """Return the pairs of a run whose longest sequence has `context_tokens`."""
        frequencies_D, factors_D = rope_frequencies(rope, head_dim, device, context_tokens), None
        if rope.attention_factor != 1.0:
            factors_D = torch.full_like(frequencies_D, rope.attention_factor)
            factors_D[int(head_dim * rope.partial_rotary_factor) // 2 :] = 1.0  # those that do not rotate stay
        return cls(frequencies_D, factors_D)

    def table(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of positions, [T, head_dim / 2] in fp32; computed once for all layers."""
        angles_TD = positions_T[:, None].float() * self.frequencies_D
        cos_TD, sin_TD = angles_TD.cos(), angles_TD.sin()
        return (cos_TD, sin_TD) if self.factors_D is None else (cos_TD * self.factors_D, sin_TD * self.factors_D)


def rope_table(rope: RopeConfig, head_dim: int, positions_T: Tensor, context_tokens: int = 0) -> tuple[Tensor, Tensor]:
    """Return the RoPE cosine and sine of positions, [T, head_dim / 2] in fp32."""
    return RotaryPairs.of(rope, head_dim, positions_T.device, context_tokens).table(positions_T)


@cache
def attention_backends(device: torch.device) -> list[SDPBackend]:
    """Return the SDPA backends to try in order of preference; torch takes the first that supports the call.

    On Hopper and later cuDNN is about 1.7 times as fast as FlashAttention-2.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    gpu = capabilities(device)
    if gpu.has("cudnn_attention"):
        backends.reverse()
    if gpu.compute is not None:
        missing = {SDPBackend.CUDNN_ATTENTION: "cudnn_attention", SDPBackend.FLASH_ATTENTION: "flash_attention"}
        backends = [backend for backend in backends if missing[backend] not in gpu.forced]
    return [*backends, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of whole sequences; k and v may have fewer heads (GQA).

    Logits are multiplied by `scale`, by default 1 / sqrt(D), and soft-capped to +-softcap if given. With a sliding
    window a token attends to itself and the `window` - 1 tokens before it. A sink is one more logit of each softmax.
    """
    assert q_BHTD.shape[2] == k_BHTD.shape[2], "is_causal aligns fewer queries with the first keys"
    window = None if window is None or window >= q_BHTD.shape[2] else window
    if softcap is not None:
        assert sinks_H is None, "no model has a softcap and sinks"
        return softcap_attention(q_BHTD, k_BHTD, v_BHTD, scale or q_BHTD.shape[-1] ** -0.5, softcap, window)
    if window is not None or sinks_H is not None:
        return window_attention(q_BHTD, k_BHTD, v_BHTD, scale or q_BHTD.shape[-1] ** -0.5, window, sinks_H)
    grouped = q_BHTD.shape[1] != k_BHTD.shape[1]
    with sdpa_kernel(attention_backends(q_BHTD.device), set_priority=True):
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, scale=scale, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention, with RoPE where cosine and sine are given.

    `kind` is a letter of the model's attention pattern. Biases are parameters of their own, so that precision policies
    for linear layers leave them alone. Head counts follow from the projections' outputs, so tensor parallelism needs no
    other code, except that each of its ranks adds an equal part of the output bias (`o_bias_scale`). Context
    parallelism replaces `attend`.
    """

    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None

    def __init__(self, model: Model, kind: str = "F"):
        super().__init__()
        if model.heads % model.kv_heads:
            raise ConfigError(f"model {model.name}: kv_heads={model.kv_heads} does not divide heads={model.heads}")
        if model.rope is not None and model.head_dim % 2:
            raise ConfigError(f"model {model.name}: head_dim={model.head_dim} must be even for RoPE")
        self.head_dim = model.head_dim
        self.scale, self.softcap = model.softmax_scale, model.attn_logit_softcap
        self.window = attention_window(model, kind)
        self.attend: Callable[..., Tensor] = causal_attention
        self.q = nn.Linear(model.hidden, model.heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.hidden, model.kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.hidden, model.kv_heads * model.head_dim, bias=False)
        self.o = nn.Linear(model.heads * model.head_dim, model.hidden, bias=False)
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        biases = {"q": model.qkv_bias, "k": model.qkv_bias, "v": model.qkv_bias, "o": model.o_bias}
        widths = {"q": width, "k": kv_width, "v": kv_width, "o": model.hidden}
        for name, has_bias in biases.items():
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(widths[name])) if has_bias else None)
        self.o_bias_scale = 1.0
        self.sinks = nn.Parameter(torch.zeros(model.heads)) if model.attention_sinks else None
        self.qk_norm = model.qk_norm
        norm_widths = (model.head_dim, model.head_dim) if model.qk_norm == "head" else (width, kv_width)
        if model.qk_norm is not None:
            self.q_norm, self.k_norm = (RMSNorm(norm_width, model.norm_eps) for norm_width in norm_widths)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in self.qkv_heads(x_BTC, cos_TD, sin_TD))
        settings: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "window": self.window}
        if self.sinks is not None:
            settings["sinks_H"] = self.sinks
        return self.project_out(self.attend(q_BHTD, k_BHTD, v_BHTD, **settings).transpose(1, 2))

    def qkv_heads(self, x_BTC: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as attention takes them, [B, T, heads, D]: with biases, norms and RoPE."""
        biases = self.q_bias, self.k_bias, self.v_bias
        q_BTA, k_BTA, v_BTA = (_add_bias(y, bias) for y, bias in zip(self.project_qkv(x_BTC), biases, strict=True))
        if self.qk_norm == "projection":
            q_BTA, k_BTA = self.q_norm(q_BTA), self.k_norm(k_BTA)
        q_BTHD, k_BTHD, v_BTHD = (y.unflatten(-1, (-1, self.head_dim)) for y in (q_BTA, k_BTA, v_BTA))
        if self.qk_norm == "head":
            q_BTHD, k_BTHD = self.q_norm(q_BTHD), self.k_norm(k_BTHD)
        if cos_TD is not None and sin_TD is not None:
            q_BTHD, k_BTHD = fused_rope(q_BTHD, cos_TD, sin_TD), fused_rope(k_BTHD, cos_TD, sin_TD)
        return q_BTHD, k_BTHD, v_BTHD

    def project_out(self, attn_BTHD: Tensor) -> Tensor:
        """Project the attention of all heads, with the output bias."""
        out_BTC = self.o(attn_BTHD.flatten(2))
        return out_BTC if self.o_bias is None else _add_bias(out_BTC, self.o_bias * self.o_bias_scale)

    def project_qkv(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values; a precision policy may override this to fuse the projections."""
        return self.q(x_BTC), self.k(x_BTC), self.v(x_BTC)


def _add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def attention_window(model: Model, kind: str) -> int | None:
    """Return the sliding window of a layer with this letter of the attention pattern, or raise a ConfigError."""
    if kind not in ATTENTION_KINDS:
        raise ConfigError(
            f"model {model.name}: attention_pattern={model.attention_pattern!r} must be letters of F (full), "
            "S (sliding window) and N (full without position embedding)"
        )
    if kind != "S":
        return None
    if model.window is None or model.window < 1:
        raise ConfigError(f"model {model.name}: layers with a sliding window need model.window, 1 token or more")
    return model.window


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu."""

    def __init__(self, hidden: int, ffn: int, activation: str = "silu"):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.activation = activation

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(fused_activation(self.gate(x_BTC), self.activation, self.up(x_BTC)))


class PlainMlp(nn.Module):
    """down(activation(up(x))), without a gate."""

    def __init__(self, hidden: int, ffn: int, activation: str):
        super().__init__()
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.activation = activation

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(fused_activation(self.up(x_BTC), self.activation))
