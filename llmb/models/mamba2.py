"""The Mamba-2 mixer: a projection, a short convolution, the state-space recurrence, a gated norm, a projection back.

As published by Dao and Gu (2024, arXiv 2405.21060) and used in Nemotron-H. Projections compute in the number format of
what they are given; the time steps and decays, on which a whole sequence depends, are always fp32. Tensor names end in
their shape, as in `blocks.py` and `llmb/ops/mamba/ssd.py`: here C is also any other width of a token or group.

Heads come in groups that share what they write into and read from their states. All weights lie group after group, so
that a part of each, cut anywhere between groups, is a whole mixer of fewer heads; Hugging Face files hold the inward
projection and the convolution section after section (`hf_row_order.py`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.config.spec import Mamba, Model
from llmb.errors import ConfigError
from llmb.ops.mamba.causal_conv1d import causal_conv
from llmb.ops.mamba.ssd import ssd
from llmb.ops.norm.gated_norm import gated_norm

SHORTEST_STEP = 1e-3  # a token's time step is never less
INITIAL_STEPS = (1e-3, 1e-1)  # before training a head's time steps are drawn from here, evenly by their logarithm
INITIAL_DECAYS = (1.0, 16.0)  # and its rate of decay from here


class GatedNorm(nn.Module):
    """Gates by silu, then scales each group of channels to unit root mean square and each channel by its weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, y_BTC: Tensor, gate_BTGC: Tensor) -> Tensor:
        return gated_norm(y_BTC, gate_BTGC, self.weight, self.eps)


class MambaMixer(nn.Module):
    """Mixes tokens through a state that decays and is added to as each token says.

    How many groups and heads there are is read off the weights, so that a split by groups needs no other code.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.shape = shape = mamba_of(model)
        inner, channels = shape.heads * shape.head_dim, shape.groups * sum(conv_sections(shape))
        self.inward = nn.Linear(model.hidden, shape.groups * sum(inward_sections(shape)), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, shape.conv))
        self.conv_bias = nn.Parameter(torch.empty(channels))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.a_log = nn.Parameter(torch.empty(shape.heads))
        self.d = nn.Parameter(torch.empty(shape.heads))
        self.norm = GatedNorm(inner, model.norm_eps)
        self.outward = nn.Linear(inner, model.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, *convolved, steps = inward_sections(self.shape)
        made_BTGC = self.inward(x_BTC).unflatten(-1, (-1, gate + sum(convolved) + steps))
        gate_BTGC, mixed_BTGC, step_BTGK = made_BTGC.split((gate, sum(convolved), steps), dim=-1)
        groups = made_BTGC.shape[2]
        mixed_BTC = causal_conv(mixed_BTGC, self.conv_weight, self.conv_bias, tuple(convolved))
        value_BTC, b_BTC, c_BTC = mixed_BTC.split([groups * width for width in convolved], dim=-1)
        dt_BTH = F.softplus(step_BTGK.float().flatten(2) + self.dt_bias).clamp(min=SHORTEST_STEP)
        y_BTHP = ssd(
            value_BTC.unflatten(-1, (-1, self.shape.head_dim)),
            dt_BTH,
            -self.a_log.exp(),
            b_BTC.unflatten(-1, (groups, -1)),
            c_BTC.unflatten(-1, (groups, -1)),
            self.d,
            self.shape.chunk,
        )
        return self.outward(self.norm(y_BTHP.flatten(2), gate_BTGC))


def inward_sections(shape: Mamba) -> tuple[int, ...]:
    """What the inward projection makes for each group: the gate, the values, b and c, and a time step for each head."""
    return (shape.heads // shape.groups * shape.head_dim, *conv_sections(shape), shape.heads // shape.groups)


def conv_sections(shape: Mamba) -> tuple[int, ...]:
    """What of it goes through the convolution: the values, b and c."""
    return shape.heads // shape.groups * shape.head_dim, shape.state, shape.state


def fill_recurrence(name: str, parameter: Tensor, generator: torch.Generator, shape: Mamba) -> bool:
    """Convolution, time steps, decays and skip as Mamba-2 publishes them; False for a name that is none of these."""
    if name in ("conv_weight", "conv_bias"):
        bound = 1 / math.sqrt(shape.conv)
        parameter.uniform_(-bound, bound, generator=generator)
    elif name == "dt_bias":
        low, high = (math.log(step) for step in INITIAL_STEPS)
        parameter.uniform_(low, high, generator=generator).exp_().expm1_().log_()  # softplus turned round
    elif name == "a_log":
        parameter.uniform_(*INITIAL_DECAYS, generator=generator).log_()
    elif name == "d":
        parameter.fill_(1.0)
    else:
        return False
    return True


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
