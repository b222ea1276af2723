"""Context parallelism: attention and positions, compared with one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_ranks import on_ranks

from llmb.config.spec import Parallel
from llmb.models.blocks import causal_attention, sequential_positions
from llmb.ops.attention.segment_attention import Segment
from llmb.train.parallel.context_parallel import (
    ContextParallel,
    cp_attention,
    cp_segments,
    shard_positions,
    shard_sequence,
)
from llmb.train.parallel.mesh import Mesh, build_mesh

CPU = torch.device("cpu")
TOKENS = 48


def mesh_of(rank: int, **degrees: int) -> Mesh:
    dist.init_process_group("gloo")
    return build_mesh(rank, CPU, Parallel(**degrees), experts=False)


def queries_keys_values(sequences: int, heads: tuple[int, int], widths: tuple[int, int]) -> list[torch.Tensor]:
    """Return q, k, v of full sequences and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    return [torch.randn(sequences, count, TOKENS, width, generator=generator) for count, width in shapes]


def attend_on_rank(rank: int, cp: int, whole: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    mesh = mesh_of(rank, cp=cp)
    q, k, v, d_out = (shard_sequence(x.transpose(1, 2).flatten(2), mesh).unflatten(2, x.shape[1::2]) for x in whole)
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    out = cp_attention(ContextParallel(mesh.submesh("cp")), *inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out.transpose(1, 2))]


def attend_alone(whole: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in whole[:3]]
    out = causal_attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, whole[3])]


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    ("heads", "widths", "options"),
    [((4, 2), (16, 16), {}), ((4, 2), (16, 16), {"softcap": 2.0}), ((4, 4), (24, 16), {"scale": 0.3})],
    ids=["gqa", "softcap", "mla"],
)
def test_cp_attention_equals_one_process(
    cp: int, sequences: int, heads: tuple[int, int], widths: tuple[int, int], options: dict[str, Any]
) -> None:
    whole = queries_keys_values(sequences, heads, widths)
    expected = attend_alone(whole, options)
    for rank, actual in enumerate(on_ranks(cp, attend_on_rank, cp, whole, options)):
        positions = shard_positions(rank, cp, TOKENS // cp, CPU)
        for tensor, full in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, full[:, :, positions], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cp", [2, 4])
def test_bf16_is_as_close_to_fp32_as_one_process(cp: int) -> None:
    whole = [x.bfloat16() for x in queries_keys_values(2, (4, 2), (16, 16))]
    exact = attend_alone([x.float() for x in whole], {})
    alone = attend_alone(whole, {})
    outputs = on_ranks(cp, attend_on_rank, cp, whole, {})
    order = torch.cat([shard_positions(rank, cp, TOKENS // cp, CPU) for rank in range(cp)])
    for name, *shards, unsharded, full in zip(("out", "dq", "dk", "dv"), *outputs, alone, exact, strict=True):
        assert all(shard.dtype == torch.bfloat16 for shard in shards)
        pairs = (torch.cat(shards, dim=2), full[:, :, order]), (unsharded, full)
        error, bound = (float((x.float() - y).norm() / y.norm()) for x, y in pairs)
        assert error < 2 * bound + 2e-3, f"{name}: relative error {error:.4f}, of one process {bound:.4f}"


@pytest.mark.parametrize("sequences", [1, 3])
def test_gathered_rows_are_in_sequence_order_and_gradients_are_summed(sequences: int) -> None:
    """Keys are 3 wide and values 2; each rank's gradient of a row is the row times its rank + 1."""
    cp, tokens = 4, 8

    def on_rank(rank: int) -> list[torch.Tensor]:
        context = ContextParallel(mesh_of(rank, cp=cp).submesh("cp"))
        k_TW, v_TW = (torch.arange(sequences * tokens * cp * width).view(-1, width).float() for width in (3, 2))
        k_NW, v_NW = (context.shard(x, sequences) for x in (k_TW, v_TW))
        grads = context.reduce_scatter((rank + 1) * k_TW, (rank + 1) * v_TW, sequences)
        gathered = context.gather(k_NW, v_NW, sequences)
        dist.barrier()
        for actual, expected in zip((*gathered, *grads), (k_TW, v_TW, 10 * k_NW, 10 * v_NW), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        positions = shard_positions(rank, cp, tokens, CPU)
        rows = torch.cat([positions + sequence * tokens * cp for sequence in range(sequences)])
        return [k_NW, k_TW[rows]]

    for shard, expected in on_ranks(cp, on_rank):
        assert torch.equal(shard, expected)


def test_segments_of_two_sequences() -> None:
    assert cp_segments(rank=1, ranks=4, sequences=2, tokens=16) == (
        Segment(0, 8, 0, 8),
        Segment(8, 16, 0, 48),
        Segment(16, 24, 64, 72),
        Segment(24, 32, 64, 112),
    )


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_tokens_are_partitioned_with_their_positions(cp: int) -> None:
    def on_rank(rank: int) -> torch.Tensor:
        tokens = shard_sequence(torch.arange(12 * cp)[None], mesh_of(rank, cp=cp))
        dist.barrier()  # ranks that are still connecting need rank 0
        return tokens

    outputs = on_ranks(cp, on_rank)
    assert torch.cat(outputs, dim=1).sort().values.tolist() == [list(range(12 * cp))]
    for rank, tokens in enumerate(outputs):
        positions = shard_positions(rank, cp, 12, CPU) if cp > 1 else sequential_positions(12, CPU)
        assert tokens[0].tolist() == positions.tolist()


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_work_is_balanced(cp: int) -> None:
    """The work of a token is the number of tokens it attends to, itself included."""
    work = [(shard_positions(rank, cp, 64, CPU) + 1).sum().item() for rank in range(cp)]
    assert len(set(work)) == 1
