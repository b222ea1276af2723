"""Mamba decode with cached states: token by token against the whole sequence, and kernels against torch."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.selective_state_update import (
    MambaState,
    MambaWeights,
    StateRows,
    compute_dt,
    selective_state_update,
)
from llmb.ops.mamba.ssd import ssd_sequential, ssd_with_state

pytest.importorskip("triton")

SLOTS = 5
Tensors = TypeVar("Tensors", bound=tuple[Any, ...])


class Sizes(NamedTuple):
    groups: int
    group_heads: int  # heads of a group
    head_dim: int
    state: int
    kernel_size: int

    @property
    def sections(self) -> tuple[int, int, int]:
        return self.group_heads * self.head_dim, self.state, self.state


SIZES = {
    "one group": Sizes(1, 4, 8, 16, 4),
    "groups": Sizes(2, 3, 5, 7, 3),
    "a group for each head": Sizes(3, 1, 3, 6, 2),
    "partial blocks": Sizes(2, 2, 70, 20, 4),
    "kernel size 1": Sizes(1, 2, 4, 4, 1),
}


def random_case(sizes: Sizes, seed: int = 0) -> tuple[MambaWeights, MambaState, Callable[[int], Tensor]]:
    """Return weights, a state with leftovers of other sequences, and a source of rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels, heads = sizes.groups * sum(sizes.sections), sizes.groups * sizes.group_heads
    weights = MambaWeights(
        normal(channels, 1, sizes.kernel_size),
        normal(channels),
        normal(heads),
        -normal(heads).exp(),
        normal(heads),
        1e-3,
    )
    state = MambaState(
        normal(SLOTS, sizes.kernel_size - 1, channels), normal(SLOTS, heads, sizes.head_dim, sizes.state)
    )  # fmt: skip
    return weights, state, lambda rows: normal(rows, sizes.groups, sum(sizes.sections) + sizes.group_heads)


def rows_of(slots: list[int], positions: list[int], seq_lens: list[int], device: torch.device) -> StateRows:
    return StateRows(
        torch.tensor(slots, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )


def assert_close(tensor: Tensor, expected: Tensor, tolerance: float) -> None:
    assert tensor.shape == expected.shape
    if expected.numel() == 0:  # the conv state of kernel size 1
        return
    assert (tensor.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_decode_matches_the_whole_sequence(sizes: Sizes) -> None:
    """Position 0 ignores the content of its slot, and no other slot is touched."""
    weights, state, random_rows = random_case(sizes)
    untouched = [tensor[:4].clone() for tensor in state]
    xbc_dt_TGC, slot = random_rows(9), SLOTS - 1
    outputs = [
        selective_state_update(
            xbc_dt_TGC[t : t + 1], weights, state, rows_of([slot], [t], [t + 1], torch.device("cpu"))
        )
        for t in range(9)
    ]
    xbc_TGC, dt_TGK = xbc_dt_TGC.split((sum(sizes.sections), sizes.group_heads), dim=-1)
    conv = causal_conv1d.reference(xbc_TGC[None], weights.conv_C1K, weights.conv_bias_C, sizes.sections)
    x, b, c = conv.split([sizes.groups * head_dim for head_dim in sizes.sections], dim=-1)
    dt = F.softplus(dt_TGK.flatten(1) + weights.dt_bias_H).clamp(min=1e-3)
    assert torch.equal(compute_dt(dt_TGK, weights), dt)
    expected = ssd_sequential(
        x.unflatten(-1, (-1, sizes.head_dim)), dt[None], weights.a_H, b.unflatten(-1, (sizes.groups, -1)),
        c.unflatten(-1, (sizes.groups, -1)), weights.d_H,
    )  # fmt: skip
    assert_close(torch.cat(outputs), expected[0].flatten(1), 1e-5)
    assert all(torch.equal(tensor[:4], before) for tensor, before in zip(state, untouched, strict=True))


def chunked_scan(
    function: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], state: Tensor, boundaries: list[int]
) -> tuple[Tensor, Tensor]:
    """Return y and the final state of a sequence scanned in chunks, each from the state of the one before."""
    x, dt, a, b, c, d = tensors
    chunks = []
    for begin, end in zip([0, *boundaries], [*boundaries, len(x)], strict=True):
        y, state = function(state, x[begin:end], dt[begin:end], a, b[begin:end], c[begin:end], d, 8)
        chunks.append(y)
    return torch.cat(chunks), state


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", [[], [8], [1, 2, 13], [20, 24]])
def test_chunked_prefill_matches_the_whole_sequence(boundaries: list[int], device: torch.device) -> None:
    """From a zero state as `ssd_sequential`; from another one the same in torch and in kernels."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((29, 4, 6), (29, 4), (4,), (29, 2, 10), (29, 2, 10), (4,))
    x, dt, a, b, c, d = (torch.randn(*shape, generator=generator) for shape in shapes)
    tensors = [x, F.softplus(dt), -a.exp(), b, c, d]
    exact = ssd_sequential(*(tensor[None].double() if tensor.ndim > 1 else tensor.double() for tensor in tensors))[0]
    zero_state, initial_state = torch.zeros(4, 6, 10), torch.randn(4, 6, 10, generator=generator)
    assert_close(chunked_scan(ssd_with_state, tensors, zero_state, boundaries)[0], exact, 1e-5)

    device_tensors = [tensor.to(device) for tensor in tensors]
    assert_close(chunked_scan(ssd_with_state.triton, device_tensors, zero_state.to(device), boundaries)[0], exact, 1e-5)
    expected, expected_state = chunked_scan(
        ssd_with_state, [tensor.double() for tensor in tensors], initial_state.double(), list(range(1, 29))
    )
    for function, given_tensors in ((ssd_with_state, tensors), (ssd_with_state.triton, device_tensors)):
        y, after = chunked_scan(function, given_tensors, initial_state.to(given_tensors[0].device), boundaries)
        assert_close(y, expected, 1e-5)
        assert_close(after, expected_state, 1e-5)
