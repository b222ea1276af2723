"""Cases of the ops in llmb/ops/mamba."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, bfloat16, device, dtype, float16, float32

from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, StateRows, selective_state_update
from llmb.ops.mamba.ssd import ssd, ssd_with_state
from op_cases import Arguments, cases, full_size_cases, in_wider_rows, randn

# Triton's interpreter truncates bf16, and multiplies its bits as integers.
HALF, HALF_TOLERANCE = (bfloat16, 1e-2) if torch.cuda.is_available() else (float16, 2e-3)


@cases(
    causal_conv1d,
    (2, 34, 2, (15, 10, 10), 4),
    (1, 1, 1, (3,), 4),
    (1, 35, 4, (1, 1), 2),
    (3, 5, 1, (8, 4, 4), 3),
    (1, 9, 2, (2,), 1),
    (1, 3, 7, (3, 8, 8), 2),
    (1, 130, 1, (60, 5, 5), 4),
    (1, 9, 2, (15, 10, 10), 4, 0.0),
    tolerance=1e-5,
)
@cases(causal_conv1d, (1, 9, 2, (15, 10, 10), 4, 30.0), tolerance=3e-5)  # large inputs of SiLU have larger errors
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


@cases(causal_conv1d, (2, 9, 2, (10, 5, 5), 4), tolerance=2**-7)  # one bf16 step: the interpreter truncates
@full_size_cases(causal_conv1d, (2, 1000, 8, (1024, 128, 128), 4), tolerance=4e-3)
def bf16_conv_inside_wider_rows(
    g: Generator, d: device, batch: int, tokens: int, groups: int, sections: tuple[int, ...], kernel_size: int
) -> Arguments:
    channels = groups * sum(sections)
    x = in_wider_rows(randn(g, d, batch, tokens, groups, sum(sections), dtype=bfloat16)).requires_grad_()
    weight, bias = (randn(g, d, *shape).requires_grad_() for shape in ((channels, 1, kernel_size), (channels,)))
    return (x, weight, bias, sections), {}


# Groups, heads per group, head dim, state size, kernel size.
@cases(
    selective_state_update,
    (1, 4, 8, 16, 4),
    (2, 3, 5, 7, 3),
    (3, 1, 3, 6, 2),
    (2, 2, 70, 20, 4),
    (1, 2, 4, 4, 1),
    (3, 2, 19, 13, 5),
    (1, 3, 1, 1, 5),
    tolerance=1e-5,
)
@cases(selective_state_update, (2, 3, 5, 7, 3, HALF), tolerance=HALF_TOLERANCE)
def running_starting_and_padding_rows(
    g: Generator, d: device, groups: int, group_heads: int, head_dim: int, state_size: int, kernel_size: int,
    dtype: dtype = float32,
) -> Arguments:  # fmt: skip
    slots, channels, heads = 5, groups * (group_heads * head_dim + 2 * state_size), groups * group_heads
    weights = MambaWeights(
        randn(g, d, channels, 1, kernel_size),
        randn(g, d, channels),
        randn(g, d, heads),
        -randn(g, d, heads).exp(),
        randn(g, d, heads),
        1e-3,
    )
    state = MambaState(
        randn(g, d, slots, kernel_size - 1, channels, dtype=dtype), randn(g, d, slots, heads, head_dim, state_size)
    )
    rows = StateRows(
        torch.tensor([3, 1, 0, -7, 4], device=d),  # the slot of padding may be invalid
        torch.tensor([5, 0, 17, 0, 2], device=d),
        torch.tensor([6, 1, 18, 0, 3], dtype=torch.int32, device=d),
    )
    xbc_dt = in_wider_rows(randn(g, d, 5, groups, channels // groups + group_heads, dtype=dtype))  # next to the gate
    return (xbc_dt, weights, state, rows), {}


@cases(selective_state_update, *((dt,) for dt in (-90.0, -9.0, -6.5, -1.0, 15.0, 40.0, 300.0)), tolerance=5e-6)
def any_time_step(g: Generator, d: device, raw_dt: float) -> Arguments:
    """Softplus is visible in what one token adds to a zero state: dt * x * b."""
    (xbc_dt, weights, state, rows), _ = running_starting_and_padding_rows(g, d, 1, 1, 2, 2, 1)
    xbc_dt[..., -1] = raw_dt
    return (xbc_dt[1:2], weights, state, StateRows(*(tensor[1:2] for tensor in rows))), {}


@full_size_cases(selective_state_update, (float32,), tolerance=1e-5, exact=None)
@full_size_cases(selective_state_update, (bfloat16,), tolerance=5e-3, exact=None)
def rows_of_nemotron_h_8b(g: Generator, d: device, dtype: dtype) -> Arguments:
    """64 rows in shuffled slots: one starts a sequence, three are padding with invalid slots."""
    groups, heads, head_dim, state_size, slots = 8, 128, 64, 128, 70
    channels = heads * head_dim + 2 * groups * state_size
    rates = 1 + 15 * torch.rand(heads, generator=g).to(d)
    conv, bias, dt_bias, skip = (randn(g, d, *shape) for shape in ((channels, 1, 4), (channels,), (heads,), (heads,)))
    weights = MambaWeights(conv / 2, bias, dt_bias - 4, -rates, skip, 1e-3)
    state = MambaState(randn(g, d, slots, 3, channels, dtype=dtype), randn(g, d, slots, heads, head_dim, state_size))
    positions, lengths = torch.arange(100, 164), torch.arange(101, 165, dtype=torch.int32)
    positions[5], lengths[5], lengths[61:] = 0, 1, 0
    indices = torch.tensor([row * 37 % slots for row in range(61)] + [-1, slots, 10**9])
    xbc_dt = in_wider_rows(randn(g, d, 64, groups, (channels + heads) // groups, dtype=dtype))
    return (xbc_dt, weights, state, StateRows(indices.to(d), positions.to(d), lengths.to(d))), {}


# Sequences, tokens, heads, head dim, groups, state size, chunk.
@cases(
    ssd,
    (2, 20, 2, 8, 1, 16, 16),
    (1, 21, 4, 8, 2, 5, 16),
    (1, 1, 1, 4, 1, 4, 16),
    (1, 3, 2, 4, 1, 4, 1),
    (1, 140, 1, 16, 1, 16, 128),
    (1, 90, 1, 20, 1, 70, 75),
    *((1, 20, 1, 8, 1, 8, 16, scale) for scale in (0.0, 1e4)),
    *((1, 30, 1, 8, 1, 8, 24, 1.0, rate) for rate in (0.0, -1e4)),
    tolerance=5e-5,
)
@cases(ssd, (1, 20, 2, 16, 1, 16, 16, 1.0, None, HALF), tolerance=2 * HALF_TOLERANCE)
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
    scale: float = 1.0,
    rate: float | None = None,
    dtype: dtype = float32,
) -> Arguments:
    x, dt, a, b, c, skip = scan_inputs(g, d, (batch, tokens), heads, head_dim, groups, state_size)
    a = a if rate is None else torch.full_like(a, rate)  # 0 sums all earlier tokens, a large one leaves the last
    tensors = (x * scale).to(dtype), dt, a, b.to(dtype), c.to(dtype), skip
    return (*(tensor.requires_grad_() for tensor in tensors), chunk), {}


@full_size_cases(ssd, (2, 300, 8, 2, 128, float32), (1, 515, 4, 4, 256, float32), tolerance=5e-5)
@full_size_cases(ssd, (1, 2148, 128, 8, 128, bfloat16), (1, 2148, 32, 8, 256, bfloat16), tolerance=1e-2)
def scan_at_the_start_of_training(
    g: Generator, d: device, batch: int, tokens: int, heads: int, groups: int, state_size: int, dtype: dtype
) -> Arguments:
    """Chunks are as long as the state."""
    x, b, c = (
        randn(g, d, batch, tokens, *shape) for shape in ((heads, 64), (groups, state_size), (groups, state_size))
    )
    dt, rates = F.softplus(randn(g, d, batch, tokens, heads) - 4), 1 + 15 * torch.rand(heads, generator=g).to(d)
    tensors = x.to(dtype), dt, -rates, (b / 4).to(dtype), (c / 4).to(dtype), randn(g, d, heads)
    return (*(tensor.requires_grad_() for tensor in tensors), state_size), {}


@cases(ssd_with_state, (29, 4, 6, 2, 10, 8), (1, 2, 4, 1, 4, 16), (20, 2, 5, 1, 7, 8), tolerance=2e-5)
def scan_from_initial_state(
    g: Generator, d: device, tokens: int, heads: int, head_dim: int, groups: int, state_size: int, chunk: int
) -> Arguments:
    state = randn(g, d, heads, head_dim, state_size)
    return (state, *scan_inputs(g, d, (tokens,), heads, head_dim, groups, state_size), chunk), {}


def scan_inputs(
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


@full_size_cases(ssd_with_state, (700, float32), (797, float32), tolerance=5e-5)
@full_size_cases(ssd_with_state, (700, bfloat16), (3, bfloat16), tolerance=1e-2)
def scan_of_a_prefill_chunk(g: Generator, d: device, tokens: int, dtype: dtype) -> Arguments:
    (x, dt, a, b, c, skip, chunk), _ = scan_at_the_start_of_training(g, d, 1, tokens, 128, 8, 128, dtype)
    sequence = (tensor.detach()[0] for tensor in (x, dt))
    return (randn(g, d, 128, 64, 128), *sequence, a.detach(), b.detach()[0], c.detach()[0], skip.detach(), chunk), {}
