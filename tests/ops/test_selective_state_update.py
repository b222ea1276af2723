"""Mamba decode with cached states: token by token, or in chunks, against the whole sequence."""

import pytest
import torch
import torch.nn.functional as F
from op_cases.mamba import running_starting_and_padding_rows, scan_inputs
from torch import Tensor

from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.selective_state_update import StateRows, compute_dt, selective_state_update
from llmb.ops.mamba.ssd import ssd_sequential, ssd_with_state

pytest.importorskip("triton")

# Groups, heads per group, head dim, state size, kernel size.
SIZES = {
    "one group": (1, 4, 8, 16, 4),
    "groups": (2, 3, 5, 7, 3),
    "a group for each head": (3, 1, 3, 6, 2),
    "partial blocks": (2, 2, 70, 20, 4),
    "kernel size 1": (1, 2, 4, 4, 1),
}


def assert_close(tensor: Tensor, expected: Tensor, tolerance: float) -> None:
    assert tensor.shape == expected.shape
    assert (tensor.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_decode_matches_the_whole_sequence(sizes: tuple[int, int, int, int, int]) -> None:
    """Position 0 ignores the content of its slot, and no other slot is touched."""
    groups, group_heads, head_dim, state_size, _ = sizes
    sections, generator = (group_heads * head_dim, state_size, state_size), torch.Generator()
    (_, weights, state, _), _ = running_starting_and_padding_rows(generator, torch.device("cpu"), *sizes)
    untouched = [tensor[:4].clone() for tensor in state]
    xbc_dt_TGC = torch.randn(9, groups, sum(sections) + group_heads, generator=generator)
    outputs = [
        selective_state_update(
            xbc_dt_TGC[t : t + 1], weights, state, StateRows(*(torch.tensor([index]) for index in (4, t, t + 1)))
        )
        for t in range(9)
    ]
    xbc_TGC, dt_TGK = xbc_dt_TGC.split((sum(sections), group_heads), dim=-1)
    conv = causal_conv1d.reference(xbc_TGC[None], weights.conv_C1K, weights.conv_bias_C, sections)
    x, b, c = conv.split([groups * width for width in sections], dim=-1)
    dt = F.softplus(dt_TGK.flatten(1) + weights.dt_bias_H).clamp(min=1e-3)
    assert torch.equal(compute_dt(dt_TGK, weights), dt)
    expected = ssd_sequential(
        x.unflatten(-1, (-1, head_dim)), dt[None], weights.a_H, b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)), weights.d_H,
    )  # fmt: skip
    assert_close(torch.cat(outputs), expected[0].flatten(1), 1e-5)
    assert all(torch.equal(tensor[:4], before) for tensor, before in zip(state, untouched, strict=True))


def chunked_scan(tensors: list[Tensor], state: Tensor, boundaries: list[int]) -> tuple[Tensor, Tensor]:
    """Return y and the final state of a sequence scanned in chunks, each from the state of the one before."""
    x, dt, a, b, c, d = tensors
    chunks = []
    for begin, end in zip([0, *boundaries], [*boundaries, len(x)], strict=True):
        y, state = ssd_with_state(state, x[begin:end], dt[begin:end], a, b[begin:end], c[begin:end], d, 8)
        chunks.append(y)
    return torch.cat(chunks), state


@pytest.mark.parametrize("boundaries", [[], [8], [1, 2, 13], [20, 24]])
def test_chunked_prefill_matches_the_whole_sequence(boundaries: list[int]) -> None:
    """From a zero state as `ssd_sequential`, from another one as token by token; kernels: op_cases/mamba.py."""
    generator = torch.Generator().manual_seed(1)
    tensors = scan_inputs(generator, torch.device("cpu"), (29,), 4, 6, 2, 10)
    exact = ssd_sequential(*(tensor[None].double() if tensor.ndim > 1 else tensor.double() for tensor in tensors))[0]
    zero_state, initial_state = torch.zeros(4, 6, 10), torch.randn(4, 6, 10, generator=generator)
    assert_close(chunked_scan(tensors, zero_state, boundaries)[0], exact, 1e-5)
    one_by_one = [tensor.double() for tensor in tensors], initial_state.double(), list(range(1, 29))
    for actual, expected in zip(
        chunked_scan(tensors, initial_state, boundaries), chunked_scan(*one_by_one), strict=True
    ):
        assert_close(actual, expected, 1e-5)
