"""The Mamba-2 mixer: a projection, a short convolution, the state-space recurrence, a gated norm, a projection back.

As published by Dao and Gu (2024, arXiv 2405.21060) and used in Nemotron-H. Projections compute in the number format of
what they are given; the time steps and decays, on which a whole sequence depends, are always fp32. Tensor names end in
their shape, as in `blocks.py` and `llmb/kernels/ssd.py`: here C is also any other width of a token.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.errors import ConfigError
from llmb.kernels.causal_conv import causal_conv
from llmb.kernels.gated_norm import gated_norm
from llmb.kernels.ssd import ssd
from llmb.spec import Mamba, Model

SHORTEST_STEP = 1e-3  # a token's time step is never less
INITIAL_STEPS = (1e-3, 1e-1)  # before training a head's time steps are drawn from here, evenly by their logarithm
INITIAL_DECAYS = (1.0, 16.0)  # and its rate of decay from here


class GatedNorm(nn.Module):
    """Gates by silu, then scales each group of channels to unit root mean square and each channel by its weight."""

    def __init__(self, width: int, groups: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.groups, self.eps = groups, eps

    def forward(self, y_BTC: Tensor, gate_BTC: Tensor) -> Tensor:
        return gated_norm(y_BTC, gate_BTC, self.weight, self.groups, self.eps)


class MambaMixer(nn.Module):
    """Mixes tokens through a state that decays and is added to as each token says."""

    def __init__(self, model: Model):
        super().__init__()
        self.shape = shape = mamba_of(model)
        inner, shared = shape.heads * shape.head_dim, shape.groups * shape.state
        self.parts = (inner, inner + 2 * shared, shape.heads)  # gate; x, b and c; time steps
        self.convolved = (inner, shared, shared)
        self.inward = nn.Linear(model.hidden, sum(self.parts), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.parts[1], 1, shape.conv))
        self.conv_bias = nn.Parameter(torch.empty(self.parts[1]))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.a_log = nn.Parameter(torch.empty(shape.heads))
        self.d = nn.Parameter(torch.empty(shape.heads))
        self.norm = GatedNorm(inner, shape.groups, model.norm_eps)
        self.outward = nn.Linear(inner, model.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        shape = self.shape
        gate_BTC, mixed_BTC, step_BTH = self.inward(x_BTC).split(self.parts, dim=-1)
        mixed_BTC = causal_conv(mixed_BTC, self.conv_weight, self.conv_bias)
        value_BTC, b_BTC, c_BTC = mixed_BTC.split(self.convolved, dim=-1)
        dt_BTH = F.softplus(step_BTH.float() + self.dt_bias).clamp(min=SHORTEST_STEP)
        y_BTHP = ssd(
            value_BTC.unflatten(-1, (shape.heads, shape.head_dim)),
            dt_BTH,
            -self.a_log.exp(),
            b_BTC.unflatten(-1, (shape.groups, shape.state)),
            c_BTC.unflatten(-1, (shape.groups, shape.state)),
            self.d,
            shape.chunk,
        )
        return self.outward(self.norm(y_BTHP.flatten(2), gate_BTC))

    @torch.no_grad()
    def init_recurrence(self, generator: torch.Generator) -> None:
        """Convolution, time steps, decays and skip as Mamba-2 publishes them; the projections are not touched."""
        bound = 1 / math.sqrt(self.shape.conv)
        self.conv_weight.uniform_(-bound, bound, generator=generator)
        self.conv_bias.uniform_(-bound, bound, generator=generator)
        low, high = (math.log(step) for step in INITIAL_STEPS)
        self.dt_bias.uniform_(low, high, generator=generator).exp_().expm1_().log_()  # softplus turned round
        self.a_log.uniform_(*INITIAL_DECAYS, generator=generator).log_()
        self.d.fill_(1.0)


def mamba_of(model: Model) -> Mamba:
    """The mixer's sizes, checked."""
    if model.mamba is None:
        raise ConfigError(f"model {model.name}: a pattern with M needs the field mamba")
    shape = model.mamba
    for name in ("heads", "head_dim", "groups", "state", "chunk", "conv"):
        if getattr(shape, name) < 1:
            raise ConfigError(f"model {model.name}: mamba.{name}={getattr(shape, name)}: must be at least 1")
    if shape.heads % shape.groups:
        raise ConfigError(f"model {model.name}: mamba.groups={shape.groups} does not divide heads={shape.heads}")
    return shape
