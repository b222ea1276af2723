"""Layouts scaled to fewer ranks: all ranks are used, degrees divide the recipe's, split dimensions stay split."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.config.proxy_layout import shrink_layout
from llmb.config.spec import Parallel

LLAMA_405B_H100 = Parallel(tp=8, pp=8, cp=2, vp=8, dp=8)
LLAMA_405B_GB200 = Parallel(fsdp=True, tp=2, dp=64)
GROK_GB200 = Parallel(tp=4, ep=8, etp=4, dp=32, vp=1)
GROK_H100 = Parallel(tp=4, pp=8, cp=2, ep=8, dp=8, vp=8)
NEMOTRON = Parallel(tp=8, dp=4)


@pytest.mark.parametrize(
    ("real", "ranks", "expected"),
    [
        (LLAMA_405B_H100, 16, Parallel(tp=2, pp=2, cp=2, vp=2, dp=2)),
        (LLAMA_405B_H100, 8, Parallel(tp=2, pp=2, cp=2, vp=2)),
        (LLAMA_405B_H100, 4, Parallel(tp=2, pp=2, vp=2)),
        (LLAMA_405B_H100, 2, Parallel(tp=2)),
        (LLAMA_405B_H100, 64, Parallel(tp=4, pp=4, cp=2, vp=2, dp=2)),
        (LLAMA_405B_H100, 12, Parallel(tp=2, pp=2, vp=2, dp=3)),
        (LLAMA_405B_GB200, 16, Parallel(fsdp=True, tp=2, dp=8)),
        (LLAMA_405B_GB200, 2, Parallel(tp=2)),
        (GROK_GB200, 16, Parallel(tp=2, ep=4, etp=2, dp=8)),
        (GROK_H100, 16, Parallel(tp=2, pp=2, cp=2, ep=4, vp=2, dp=2)),
        (NEMOTRON, 8, Parallel(tp=4, dp=2)),
        (Parallel(), 7, Parallel(dp=7)),
    ],
)
def test_recipe_layouts_scale_down(real, ranks, expected):
    assert shrink_layout(real, ranks) == expected


degrees = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw):
    """Generate layouts like those of recipes: powers of two, experts within a pipeline stage."""
    dense = Parallel(tp=draw(degrees), pp=draw(degrees), cp=draw(degrees), dp=draw(degrees), fsdp=draw(st.booleans()))
    stage = dense.world_size // dense.pp
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8) if stage % d == 0]))
    etp = draw(st.sampled_from([d for d in (1, 2, 4, 8) if stage % (ep * d) == 0]))
    return replace(dense, ep=ep, etp=etp, vp=draw(st.sampled_from([None, 1, 2, 5])) if dense.pp > 1 else None)


@given(real=layouts(), ranks=st.integers(1, 4096))
def test_every_rank_is_used_and_every_degree_divides(real, ranks):
    small = shrink_layout(real, ranks)
    assert small.world_size == ranks
    assert (ranks // small.pp) % (small.ep * small.etp) == 0
    for degree in ("tp", "pp", "cp", "ep", "etp"):
        assert getattr(real, degree) % getattr(small, degree) == 0
    assert small.vp in (None, 2)
    assert small.vp is None or (small.pp > 1 and (real.vp or 1) > 1)
    assert not small.fsdp or (real.fsdp and small.dp * small.cp > 1)


@given(real=layouts(), doublings=st.integers(0, 12))
def test_split_dimensions_stay_split_as_far_as_ranks_allow(real, doublings):
    small = shrink_layout(real, 2**doublings)
    dense = [d for d in ("tp", "pp", "cp", "dp") if getattr(real, d) > 1]
    split = [d for d in dense if getattr(small, d) > 1]
    assert split == dense[: min(doublings, len(dense))]
    inside = [d for d in ("ep", "etp") if getattr(real, d) > 1]
    factors = (2**doublings // small.pp).bit_length() - 1  # of the ranks of a stage
    assert [d for d in inside if getattr(small, d) > 1] == inside[: min(factors, len(inside))]


@given(real=layouts())
def test_layout_on_the_recipes_ranks_is_unchanged(real):
    small = shrink_layout(real, real.world_size)
    assert all(getattr(small, d) == getattr(real, d) for d in ("tp", "pp", "cp", "dp", "ep", "etp"))
