"""Cases of the ops in llmb/ops/mamba."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, device

from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, StateRows, selective_state_update
from llmb.ops.mamba.ssd import ssd, ssd_with_state
from op_cases import Arguments, cases, randn


@cases(
    causal_conv1d,
    (2, 66, 2, (15, 10, 10), 4),
    (1, 1, 1, (3,), 4),
    (1, 70, 4, (1, 1), 2),
    (3, 5, 1, (8, 4, 4), 3),
    (1, 9, 2, (2,), 1),
    (1, 3, 5, (3, 8, 8), 2),
    (1, 290, 2, (70, 5, 5), 4),
    (2, 66, 2, (15, 10, 10), 4, 0.0),
    tolerance=1e-5,
)
def conv_with_gradients(
    g: Generator,
    d: device,
    batch: int,
    tokens: int,
    groups: int,
    sections: tuple[int, ...],
    kernel_size: int,
    scale: float = 1.0,
) -> Arguments:
    channels = groups * sum(sections)
    shapes = ((batch, tokens, groups, sum(sections)), (channels, 1, kernel_size), (channels,))
    return (*(randn(g, d, *shape, scale=scale).requires_grad_() for shape in shapes), sections), {}


# Groups, heads per group, head dim, state size, kernel size.
@cases(
    selective_state_update,
    (1, 4, 8, 16, 4),
    (2, 3, 5, 7, 3),
    (3, 1, 3, 6, 2),
    (2, 2, 70, 20, 4),
    (1, 2, 4, 4, 1),
    tolerance=1e-5,
)
def running_starting_and_padding_rows(
    g: Generator, d: device, groups: int, group_heads: int, head_dim: int, state_size: int, kernel_size: int
) -> Arguments:
    slots, channels, heads = 5, groups * (group_heads * head_dim + 2 * state_size), groups * group_heads
    weights = MambaWeights(
        randn(g, d, channels, 1, kernel_size),
        randn(g, d, channels),
        randn(g, d, heads),
        -randn(g, d, heads).exp(),
        randn(g, d, heads),
        1e-3,
    )
    state = MambaState(randn(g, d, slots, kernel_size - 1, channels), randn(g, d, slots, heads, head_dim, state_size))
    rows = StateRows(
        torch.tensor([3, 1, 0, -7, 4], device=d),  # the slot of padding may be invalid
        torch.tensor([5, 0, 17, 0, 2], device=d),
        torch.tensor([6, 1, 18, 0, 3], dtype=torch.int32, device=d),
    )
    return (randn(g, d, 5, groups, channels // groups + group_heads), weights, state, rows), {}


# Sequences, tokens, heads, head dim, groups, state size, chunk.
@cases(
    ssd,
    (2, 48, 4, 8, 1, 16, 16),
    (1, 37, 6, 8, 3, 5, 16),
    (2, 21, 2, 3, 2, 7, 8),
    (1, 5, 4, 16, 2, 16, 32),
    (1, 1, 2, 4, 1, 4, 16),
    (1, 6, 2, 4, 1, 4, 1),
    tolerance=5e-5,
)
def scan_with_gradients(
    g: Generator,
    d: device,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    chunk: int,
) -> Arguments:
    tensors = _scan_inputs(g, d, (batch, tokens), heads, head_dim, groups, state_size)
    return (*(tensor.requires_grad_() for tensor in tensors), chunk), {}


@cases(ssd_with_state, (29, 4, 6, 2, 10, 8), (1, 2, 4, 1, 4, 16), (20, 2, 5, 1, 7, 8), tolerance=2e-5)
def scan_from_initial_state(
    g: Generator, d: device, tokens: int, heads: int, head_dim: int, groups: int, state_size: int, chunk: int
) -> Arguments:
    state = randn(g, d, heads, head_dim, state_size)
    return (state, *_scan_inputs(g, d, (tokens,), heads, head_dim, groups, state_size), chunk), {}


def _scan_inputs(
    g: Generator, d: device, leading: tuple[int, ...], heads: int, head_dim: int, groups: int, state_size: int
) -> list[Tensor]:
    return [
        randn(g, d, *leading, heads, head_dim),
        F.softplus(randn(g, d, *leading, heads)),
        -randn(g, d, heads).exp(),
        randn(g, d, *leading, groups, state_size),
        randn(g, d, *leading, groups, state_size),
        randn(g, d, heads),
    ]
