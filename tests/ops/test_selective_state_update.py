"""Mamba decode with cached states: token by token against the whole sequence, and kernels against torch."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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


def to_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copy weights or a state to a device."""
    return type(tensors)(
        *(tensor.to(device, copy=True) if isinstance(tensor, Tensor) else tensor for tensor in tensors)
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


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_kernels_match_torch_over_two_steps(sizes: Sizes, device: torch.device) -> None:
    """Running sequences, one that begins, padding whose slot is another's or invalid."""
    weights, state, random_rows = random_case(sizes)
    device_weights, device_state = to_device(weights, device), to_device(state, device)
    before = to_device(state, torch.device("cpu"))
    for slots in ([3, 1, 0, -7, 4], [0, 3, 1, 1, 4]):
        positions, seq_lens = [5, 0, 17, 0, 2], [6, 1, 18, 0, 3]
        xbc_dt = random_rows(5)
        expected = selective_state_update.reference(
            xbc_dt, weights, state, rows_of(slots, positions, seq_lens, xbc_dt.device)
        )
        rows = rows_of(slots, positions, seq_lens, device)
        actual = selective_state_update.triton(xbc_dt.to(device), device_weights, device_state, rows)
        assert not actual[3].any()
        assert_close(actual, expected, 1e-5)
        for tensor, expected_state in zip(device_state, state, strict=True):
            assert_close(tensor, expected_state, 1e-5)
    for tensor, expected_state in zip(device_state, before, strict=True):
        assert torch.equal(tensor[2].cpu(), expected_state[2])  # an unused slot


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 3), group_heads=st.integers(1, 3), head_dim=st.integers(1, 20), state=st.integers(1, 20),
    kernel_size=st.integers(1, 5),
    rows=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=SLOTS),
)  # fmt: skip
def test_kernels_on_any_size(
    device: torch.device,
    groups: int,
    group_heads: int,
    head_dim: int,
    state: int,
    kernel_size: int,
    rows: list[tuple[bool, int]],
) -> None:
    weights, host_state, random_rows = random_case(
        Sizes(groups, group_heads, head_dim, state, kernel_size), seed=head_dim
    )
    device_weights, device_state = to_device(weights, device), to_device(host_state, device)
    seq_lens = [position + 1 if valid else 0 for valid, position in rows]
    row_lists = (list(range(len(rows))), [position for _, position in rows], seq_lens)
    xbc_dt = random_rows(len(rows))
    expected = selective_state_update.reference(xbc_dt, weights, host_state, rows_of(*row_lists, xbc_dt.device))
    assert_close(
        selective_state_update.triton(xbc_dt.to(device), device_weights, device_state, rows_of(*row_lists, device)),
        expected,
        1e-5,
    )
    for tensor, expected_tensor in zip(device_state, host_state, strict=True):
        assert_close(tensor, expected_tensor, 1e-5)


def test_kernels_in_half_precision_on_a_slice(device: torch.device) -> None:
    """bf16 on a GPU, fp16 in Triton's interpreter, which truncates bf16; the input is a slice."""
    dtype, tolerance = (torch.bfloat16, 1e-2) if device.type == "cuda" else (torch.float16, 1.5e-3)
    sizes = SIZES["groups"]
    weights, state, random_rows = random_case(sizes)
    state = MambaState(state.conv_state_SKC.to(dtype), state.ssm_state_SHPN)
    device_state = to_device(state, device)
    xbc_dt = random_rows(3).to(dtype)
    padded = torch.cat((xbc_dt, xbc_dt), dim=-1).to(device)
    row_lists = ([2, 0, 1], [4, 0, 9], [5, 1, 10])
    expected = selective_state_update.reference(xbc_dt, weights, state, rows_of(*row_lists, xbc_dt.device))
    actual = selective_state_update.triton(
        padded[..., xbc_dt.shape[-1] :], to_device(weights, device), device_state, rows_of(*row_lists, device)
    )  # fmt: skip
    assert actual.dtype == dtype
    assert_close(actual, expected, tolerance)
    assert torch.equal(device_state.conv_state_SKC.cpu(), state.conv_state_SKC)
    assert_close(device_state.ssm_state_SHPN, state.ssm_state_SHPN, tolerance)


@pytest.mark.parametrize("raw_dt", [-90.0, -9.0, -6.5, -1.0, 15.0, 40.0, 300.0])
def test_softplus_of_any_time_step(raw_dt: float, device: torch.device) -> None:
    """Visible in what one token adds to a zero state: dt * x * b."""
    sizes = Sizes(1, 1, 2, 2, 1)
    weights, state, random_rows = random_case(sizes)
    xbc_dt = random_rows(1)
    xbc_dt[..., -1] = raw_dt
    device_state = to_device(state, device)
    row_lists = ([0], [0], [1])
    selective_state_update.reference(xbc_dt, weights, state, rows_of(*row_lists, xbc_dt.device))
    selective_state_update.triton(
        xbc_dt.to(device), to_device(weights, device), device_state, rows_of(*row_lists, device)
    )
    assert_close(device_state.ssm_state_SHPN[0], state.ssm_state_SHPN[0], 2e-6)


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
