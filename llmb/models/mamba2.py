"""Mamba-2 mixer: input projection, causal conv1d, SSD scan, gated norm, output projection.

As published by Dao and Gu (2024, arXiv 2405.21060) and used in Nemotron-H. Projections compute in the dtype of their
input; time steps and decays, on which a whole sequence depends, are always fp32. Tensor names end in their shape, as in
`blocks.py` and `llmb/ops/mamba/ssd.py`: here C is also any other width of a token or group.

Groups of heads share B and C. All weights have the grouped layout, so that a shard of whole groups is a complete mixer
of fewer heads; Hugging Face files hold the input projection and the convolution in sections (`hf_layout.py`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.config.model import MambaConfig, Model
from llmb.errors import ConfigError
from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.ssd import ssd
from llmb.ops.norm.gated_norm import gated_norm

DT_MIN = 1e-3  # lower bound of the time step
INIT_DT_RANGE = (1e-3, 1e-1)  # initial time steps of heads, log-uniform
INIT_DECAY_RANGE = (1.0, 16.0)  # initial decay rates of heads


class GatedNorm(nn.Module):
    """RMSNorm over groups of channels, after multiplication by silu(gate)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, y_BTC: Tensor, gate_BTGC: Tensor) -> Tensor:
        return gated_norm(y_BTC, gate_BTGC, self.weight, self.eps)


class MambaMixer(nn.Module):
    """Mamba-2 block.

    The numbers of groups and heads follow from the weights, so tensor parallelism over groups needs no other code.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.shape = shape = mamba_config(model)
        inner, channels = shape.heads * shape.head_dim, shape.groups * sum(conv_sections(shape))
        self.inward = nn.Linear(model.hidden, shape.groups * sum(in_proj_sections(shape)), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, shape.conv))
        self.conv_bias = nn.Parameter(torch.empty(channels))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.a_log = nn.Parameter(torch.empty(shape.heads))
        self.d = nn.Parameter(torch.empty(shape.heads))
        self.norm = GatedNorm(inner, model.norm_eps)
        self.outward = nn.Linear(inner, model.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, *sections, dt = in_proj_sections(self.shape)
        projected_BTGC = self.inward(x_BTC).unflatten(-1, (-1, gate + sum(sections) + dt))
        gate_BTGC, xbc_BTGC, raw_dt_BTGK = projected_BTGC.split((gate, sum(sections), dt), dim=-1)
        groups = projected_BTGC.shape[2]
        xbc_BTC = causal_conv1d(xbc_BTGC, self.conv_weight, self.conv_bias, tuple(sections))
        x_inner_BTC, b_BTC, c_BTC = xbc_BTC.split([groups * width for width in sections], dim=-1)
        dt_BTH = F.softplus(raw_dt_BTGK.float().flatten(2) + self.dt_bias).clamp(min=DT_MIN)
        y_BTHP = ssd(
            x_inner_BTC.unflatten(-1, (-1, self.shape.head_dim)),
            dt_BTH,
            -self.a_log.exp(),
            b_BTC.unflatten(-1, (groups, -1)),
            c_BTC.unflatten(-1, (groups, -1)),
            self.d,
            self.shape.chunk,
        )
        return self.outward(self.norm(y_BTHP.flatten(2), gate_BTGC))


def in_proj_sections(shape: MambaConfig) -> tuple[int, ...]:
    """Return the widths of a group in the input projection: gate, x, B, C, and dt of each head."""
    return (shape.heads // shape.groups * shape.head_dim, *conv_sections(shape), shape.heads // shape.groups)


def conv_sections(shape: MambaConfig) -> tuple[int, ...]:
    """Return the widths of a group in the convolution: x, B, C."""
    return shape.heads // shape.groups * shape.head_dim, shape.state, shape.state


def init_mamba_parameter(name: str, parameter: Tensor, generator: torch.Generator, shape: MambaConfig) -> bool:
    """Initialize convolution, dt_bias, A and D as published for Mamba-2; return False for any other name."""
    if name in ("conv_weight", "conv_bias"):
        bound = 1 / math.sqrt(shape.conv)
        parameter.uniform_(-bound, bound, generator=generator)
    elif name == "dt_bias":
        low, high = (math.log(step) for step in INIT_DT_RANGE)
        parameter.uniform_(low, high, generator=generator).exp_().expm1_().log_()  # inverse softplus
    elif name == "a_log":
        parameter.uniform_(*INIT_DECAY_RANGE, generator=generator).log_()
    elif name == "d":
        parameter.fill_(1.0)
    else:
        return False
    return True


def mamba_config(model: Model) -> MambaConfig:
    """Return the validated Mamba settings of a model, or raise a ConfigError."""
    if model.mamba is None:
        raise ConfigError(f"model {model.name}: a pattern with M needs the field mamba")
    shape = model.mamba
    for name in ("heads", "head_dim", "groups", "state", "chunk", "conv"):
        if getattr(shape, name) < 1:
            raise ConfigError(f"model {model.name}: mamba.{name}={getattr(shape, name)}: must be at least 1")
    if shape.heads % shape.groups:
        raise ConfigError(f"model {model.name}: mamba.groups={shape.groups} does not divide heads={shape.heads}")
    return shape
