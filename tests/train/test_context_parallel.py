"""Context parallelism: attention, positions and training runs, compared with one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from training_ranks import on_ranks, trained

from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.models.blocks import causal_attention, sequential_positions
from llmb.train.parallel.context_parallel import cp_attention, shard_positions, shard_sequence
from llmb.train.parallel.mesh import Mesh, build_mesh
from llmb.train.train_support import supported_workload

CPU = torch.device("cpu")
TOKENS = 48


def mesh_of(rank: int, **degrees: int) -> Mesh:
    dist.init_process_group("gloo")
    return build_mesh(rank, CPU, Parallel(**degrees), experts=False)


def queries_keys_values(heads: tuple[int, int], widths: tuple[int, int]) -> list[torch.Tensor]:
    """Return q, k, v of full sequences and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    return [torch.randn(2, count, TOKENS, width, generator=generator) for count, width in shapes]


def attend_on_rank(rank: int, cp: int, whole: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    mesh = mesh_of(rank, cp=cp)
    q, k, v, d_out = (shard_sequence(x.transpose(1, 2).flatten(2), mesh).unflatten(2, x.shape[1::2]) for x in whole)
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    out = cp_attention(mesh.submesh("cp"), *inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out.transpose(1, 2))]


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(
    ("heads", "widths", "options"),
    [((4, 2), (16, 16), {}), ((4, 2), (16, 16), {"softcap": 2.0}), ((4, 4), (24, 16), {"scale": 0.3})],
    ids=["gqa", "softcap", "mla"],
)
def test_cp_attention_equals_one_process(
    cp: int, heads: tuple[int, int], widths: tuple[int, int], options: dict[str, Any]
) -> None:
    whole = queries_keys_values(heads, widths)
    inputs = [x.clone().requires_grad_() for x in whole[:3]]
    out = causal_attention(*inputs, **options)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, whole[3])]
    outputs = on_ranks(cp, attend_on_rank, cp, whole, options)
    for rank, actual in enumerate(outputs):
        positions = shard_positions(rank, cp, TOKENS // cp, CPU)
        for tensor, full in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, full[:, :, positions], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 7, 36, 37])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_causal_attention_of_last_queries(queries: int, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, heads, 37, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    among_all = causal_attention(q, k, v, **options)[:, :, -queries:]
    torch.testing.assert_close(causal_attention(q[:, :, -queries:], k, v, **options), among_all)


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


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "grok1", "deepseek"])
def test_training_equals_one_process(tmp_path: Path, architecture: str) -> None:
    """GQA, logit softcap with an auxiliary loss, and MLA, on ranks with two sequences each."""
    config = changed(CONFIG, model=SMALL_MODELS[architecture], steps=3, lr=3e-4, mbs=2, gbs=4, ga=2)
    spread, alone = (trained(changed(config, cp=cp), tmp_path / f"cp {cp}") for cp in (2, 1))
    assert spread.max_distance(alone) < 1e-5


def test_mamba_with_cp_is_refused() -> None:
    config = changed(CONFIG, model=SMALL_MODELS["nemotron_h"], cp=2)
    with pytest.raises(ConfigError, match="a Mamba layer cannot split its sequence"):
        supported_workload(config)
