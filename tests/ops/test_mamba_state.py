"""A Mamba recurrence that keeps its state: token by token against the whole sequence, and kernels against torch."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.mamba.causal_conv1d import causal_conv_reference
from llmb.ops.mamba.selective_state_update import (
    MambaState,
    MambaWeights,
    Rows,
    mamba_step,
    mamba_step_reference,
    time_steps,
)
from llmb.ops.mamba.ssd import ssd_from, ssd_reference

pytest.importorskip("triton")
from llmb.ops.mamba.selective_state_update_triton import mamba_step_triton
from llmb.ops.mamba.ssd_triton import ssd_from_triton

SLOTS = 5
Kept = TypeVar("Kept", bound=tuple[Any, ...])


class Sizes(NamedTuple):
    groups: int
    share: int  # heads of a group
    width: int
    state: int
    reach: int

    @property
    def sections(self) -> tuple[int, int, int]:
        return self.share * self.width, self.state, self.state


SIZES = {
    "one group": Sizes(1, 4, 8, 16, 4),
    "groups": Sizes(2, 3, 5, 7, 3),
    "a group for each head": Sizes(3, 1, 3, 6, 2),
    "tiles not filled": Sizes(2, 2, 70, 20, 4),
    "no past inputs": Sizes(1, 2, 4, 4, 1),
}


def drawn(sizes: Sizes, seed: int = 0) -> tuple[MambaWeights, MambaState, Callable[[int], Tensor]]:
    """Weights, a state in which something is left from before, and a source of rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels, heads = sizes.groups * sum(sizes.sections), sizes.groups * sizes.share
    weights = MambaWeights(
        normal(channels, 1, sizes.reach), normal(channels), normal(heads), -normal(heads).exp(), normal(heads), 1e-3
    )
    state = MambaState(
        normal(SLOTS, sizes.reach - 1, channels), normal(SLOTS, heads, sizes.width, sizes.state)
    )  # fmt: skip
    return weights, state, lambda rows: normal(rows, sizes.groups, sum(sizes.sections) + sizes.share)


def rows_of(slots: list[int], positions: list[int], lengths: list[int], device: torch.device) -> Rows:
    return Rows(
        torch.tensor(slots, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def moved(kept: Kept, device: torch.device) -> Kept:
    """A copy of weights or a state on a device."""
    return type(kept)(*(one.to(device, copy=True) if isinstance(one, Tensor) else one for one in kept))


def assert_near(one: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert one.shape == wanted.shape
    if wanted.numel() == 0:  # what a convolution over one token keeps
        return
    assert (one.cpu().double() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_tokens_one_by_one_give_what_the_sequence_gives(sizes: Sizes) -> None:
    """Position 0 takes nothing of what the slot held, and no other slot is touched."""
    weights, state, draw = drawn(sizes)
    others = [one[:4].clone() for one in state]
    mixed_TGC, slot = draw(9), SLOTS - 1
    one_by_one = [
        mamba_step(mixed_TGC[t : t + 1], weights, state, rows_of([slot], [t], [t + 1], torch.device("cpu")))
        for t in range(9)
    ]
    new_TGC, step_TGK = mixed_TGC.split((sum(sizes.sections), sizes.share), dim=-1)
    convolved = causal_conv_reference(new_TGC[None], weights.conv_C1K, weights.conv_bias_C, sizes.sections)
    x, b, c = convolved.split([sizes.groups * width for width in sizes.sections], dim=-1)
    dt = F.softplus(step_TGK.flatten(1) + weights.dt_bias_H).clamp(min=1e-3)
    assert torch.equal(time_steps(step_TGK, weights), dt)
    wanted = ssd_reference(
        x.unflatten(-1, (-1, sizes.width)), dt[None], weights.a_H, b.unflatten(-1, (sizes.groups, -1)),
        c.unflatten(-1, (sizes.groups, -1)), weights.d_H,
    )  # fmt: skip
    assert_near(torch.cat(one_by_one), wanted[0].flatten(1), 1e-5)
    assert all(torch.equal(one[:4], before) for one, before in zip(state, others, strict=True))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_kernels_give_what_torch_gives(sizes: Sizes, device: torch.device) -> None:
    """Sequences that go on, one that begins, padding whose slot is another's or none at all."""
    weights, state, draw = drawn(sizes)
    there_weights, there = moved(weights, device), moved(state, device)
    before = moved(state, torch.device("cpu"))
    for slots in ([3, 1, 0, -7, 4], [0, 3, 1, 1, 4]):
        positions, lengths = [5, 0, 17, 0, 2], [6, 1, 18, 0, 3]
        mixed = draw(5)
        wanted = mamba_step_reference(mixed, weights, state, rows_of(slots, positions, lengths, mixed.device))
        rows = rows_of(slots, positions, lengths, device)
        ours = mamba_step_triton(mixed.to(device), there_weights, there, rows)
        assert not ours[3].any()
        assert_near(ours, wanted, 1e-5)
        for one, kept in zip(there, state, strict=True):
            assert_near(one, kept, 1e-5)
    for one, kept in zip(there, before, strict=True):
        assert torch.equal(one[2].cpu(), kept[2])  # nobody's slot


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 3), share=st.integers(1, 3), width=st.integers(1, 20), state=st.integers(1, 20),
    reach=st.integers(1, 5), rows=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=SLOTS),
)  # fmt: skip
def test_kernels_on_any_size(
    device: torch.device, groups: int, share: int, width: int, state: int, reach: int, rows: list[tuple[bool, int]]
) -> None:
    weights, kept, draw = drawn(Sizes(groups, share, width, state, reach), seed=width)
    there_weights, there = moved(weights, device), moved(kept, device)
    lengths = [position + 1 if live else 0 for live, position in rows]
    whose = (list(range(len(rows))), [position for _, position in rows], lengths)
    mixed = draw(len(rows))
    wanted = mamba_step_reference(mixed, weights, kept, rows_of(*whose, mixed.device))
    assert_near(mamba_step_triton(mixed.to(device), there_weights, there, rows_of(*whose, device)), wanted, 1e-5)
    for one, other in zip(there, kept, strict=True):
        assert_near(one, other, 1e-5)


def test_kernels_in_a_narrow_format_and_on_a_slice(device: torch.device) -> None:
    """bf16 on a GPU, fp16 in Triton's interpreter, which cuts bf16 off; the gate lies beside what is read."""
    narrow, tolerance = (torch.bfloat16, 1e-2) if device.type == "cuda" else (torch.float16, 1.5e-3)
    sizes = SIZES["groups"]
    weights, state, draw = drawn(sizes)
    state = MambaState(state.inputs_SKC.to(narrow), state.state_SHPN)
    there = moved(state, device)
    mixed = draw(3).to(narrow)
    wide = torch.cat((mixed, mixed), dim=-1).to(device)
    whose = ([2, 0, 1], [4, 0, 9], [5, 1, 10])
    wanted = mamba_step_reference(mixed, weights, state, rows_of(*whose, mixed.device))
    ours = mamba_step_triton(
        wide[..., mixed.shape[-1] :], moved(weights, device), there, rows_of(*whose, device)
    )  # fmt: skip
    assert ours.dtype == narrow
    assert_near(ours, wanted, tolerance)
    assert torch.equal(there.inputs_SKC.cpu(), state.inputs_SKC)
    assert_near(there.state_SHPN, state.state_SHPN, tolerance)


@pytest.mark.parametrize("step", [-90.0, -9.0, -6.5, -1.0, 15.0, 40.0, 300.0])
def test_time_steps_of_any_size(step: float, device: torch.device) -> None:
    """Seen in what one token adds to a state of zero: dt * x * b."""
    sizes = Sizes(1, 1, 2, 2, 1)
    weights, state, draw = drawn(sizes)
    mixed = draw(1)
    mixed[..., -1] = step
    there = moved(state, device)
    whose = ([0], [0], [1])
    mamba_step_reference(mixed, weights, state, rows_of(*whose, mixed.device))
    mamba_step_triton(mixed.to(device), moved(weights, device), there, rows_of(*whose, device))
    assert_near(there.state_SHPN[0], state.state_SHPN[0], 2e-6)


def scanned(
    form: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], state: Tensor, cuts: list[int]
) -> tuple[Tensor, Tensor]:
    """y of a sequence that is cut into pieces, each of which goes on from the state of the last; and the last state."""
    x, dt, a, b, c, d = tensors
    pieces = []
    for begin, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
        y, state = form(state, x[begin:end], dt[begin:end], a, b[begin:end], c[begin:end], d, 8)
        pieces.append(y)
    return torch.cat(pieces), state


@pytest.mark.parametrize("cuts", [[], [8], [1, 2, 13], [20, 24]])
def test_pieces_of_a_sequence_give_what_it_gives_whole(cuts: list[int], device: torch.device) -> None:
    """From a state of zero, what `ssd_reference` gives; from any other, the same in torch and in kernels."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((29, 4, 6), (29, 4), (4,), (29, 2, 10), (29, 2, 10), (4,))
    x, dt, a, b, c, d = (torch.randn(*shape, generator=generator) for shape in shapes)
    tensors = [x, F.softplus(dt), -a.exp(), b, c, d]
    exact = ssd_reference(*(one[None].double() if one.ndim > 1 else one.double() for one in tensors))[0]
    none, some = torch.zeros(4, 6, 10), torch.randn(4, 6, 10, generator=generator)
    assert_near(scanned(ssd_from, tensors, none, cuts)[0], exact, 1e-5)

    there = [one.to(device) for one in tensors]
    assert_near(scanned(ssd_from_triton, there, none.to(device), cuts)[0], exact, 1e-5)
    wanted, end = scanned(ssd_from, [one.double() for one in tensors], some.double(), list(range(1, 29)))
    for form, given_tensors in ((ssd_from, tensors), (ssd_from_triton, there)):
        y, after = scanned(form, given_tensors, some.to(given_tensors[0].device), cuts)
        assert_near(y, wanted, 1e-5)
        assert_near(after, end, 1e-5)
