"""Context parallelism: attention over tokens and positions of each rank, compared with one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly_cases import by_turns
from training_ranks import on_ranks

from llmb.config.spec import Parallel
from llmb.models.blocks import causal_attention
from llmb.ops.attention.segment_attention import Segment
from llmb.train.parallel.context_parallel import (
    ContextParallel,
    cp_attention,
    cp_segments,
    shard_positions,
    shard_sequence,
)
from llmb.train.parallel.mesh import build_mesh

CPU = torch.device("cpu")
TOKENS = 48


def queries_keys_values(sequences: int, heads: tuple[int, int], widths: tuple[int, int]) -> list[torch.Tensor]:
    """Return q, k, v of full sequences and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    return [torch.randn(sequences, count, TOKENS, width, generator=generator) for count, width in shapes]


def attend_on_rank(rank: int, cp: int, whole: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, CPU, Parallel(cp=cp), experts=False)
    q, k, v, d_out = (shard_sequence(x.transpose(1, 2).flatten(2), mesh).unflatten(2, x.shape[1::2]) for x in whole)
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    out = cp_attention(ContextParallel(mesh.submesh("cp")), *inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out.transpose(1, 2))]


def attend_alone(whole: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in whole[:3]]
    out = causal_attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, whole[3])]


ATTENTION: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "gqa": ((4, 2), (16, 16), {}),
    "softcap": ((4, 2), (16, 16), {"softcap": 2.0}),
    "mla": ((4, 4), (24, 16), {"scale": 0.3}),
}


@pytest.mark.parametrize(("kind", "cp", "sequences"), by_turns(ATTENTION, (1, 2, 3, 4), (1, 2)))
def test_cp_attention_equals_one_process(kind: str, cp: int, sequences: int) -> None:
    assert_ranks_attend_as_one(cp, sequences, *ATTENTION[kind])


def assert_ranks_attend_as_one(
    cp: int, sequences: int, heads: tuple[int, int], widths: tuple[int, int], options: dict[str, Any]
) -> None:
    whole = queries_keys_values(sequences, heads, widths)
    expected = attend_alone(whole, options)
    for rank, actual in enumerate(on_ranks(cp, attend_on_rank, cp, whole, options)):
        positions = shard_positions(rank, cp, TOKENS // cp, CPU)
        for tensor, full in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, full[:, :, positions], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"window": 11}, {"window": 5, "softcap": 2.0}], ids=["window", "softcap"])
def test_a_sliding_window_over_ranks_equals_one_process(options: dict[str, Any]) -> None:
    assert_ranks_attend_as_one(2, 2, (4, 2), (16, 16), options)


def test_segments_of_two_sequences() -> None:
    assert cp_segments(rank=1, ranks=4, sequences=2, tokens=16) == (
        Segment(0, 8, 0, 8),
        Segment(8, 16, 0, 48),
        Segment(16, 24, 64, 72),
        Segment(24, 32, 64, 112),
    )


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_work_is_balanced(cp: int) -> None:
    """The work of a token is the number of tokens it attends to, itself included."""
    work = [(shard_positions(rank, cp, 64, CPU) + 1).sum().item() for rank in range(cp)]
    assert len(set(work)) == 1
