"""A sequence over several ranks: attention, positions and whole training runs, against those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, trained
from small_config import CONFIG, changed
from small_models import SMALL_MODELS

from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.models.blocks import causal_attention, positions_in_order
from llmb.train.parallel.context_parallel import attention_over_ranks, own_positions, own_tokens
from llmb.train.parallel.mesh import Mesh, divided
from llmb.train.train_support import supported_workload

CPU = torch.device("cpu")
TOKENS = 48


def mesh_of(rank: int, **degrees: int) -> Mesh:
    dist.init_process_group("gloo")
    return divided(rank, CPU, Parallel(**degrees), experts=False)


def queries_keys_values(heads: tuple[int, int], widths: tuple[int, int]) -> list[torch.Tensor]:
    """Whole sequences, and last the slope with which the loss rises along the output."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    return [torch.randn(2, count, TOKENS, width, generator=generator) for count, width in shapes]


def attend_on_rank(rank: int, cp: int, whole: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    mesh = mesh_of(rank, cp=cp)
    q, k, v, slope = (own_tokens(x.transpose(1, 2).flatten(2), mesh).unflatten(2, x.shape[1::2]) for x in whole)
    given = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    mixed = attention_over_ranks(mesh.sub("cp"), *given, **options)
    return [mixed.detach(), *torch.autograd.grad(mixed, given, slope.transpose(1, 2))]


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(
    ("heads", "widths", "options"),
    [((4, 2), (16, 16), {}), ((4, 2), (16, 16), {"cap": 2.0}), ((4, 4), (24, 16), {"scale": 0.3})],
    ids=["grouped queries", "capped", "latent"],
)
def test_attention_equals_that_of_one_process(
    cp: int, heads: tuple[int, int], widths: tuple[int, int], options: dict[str, Any]
) -> None:
    whole = queries_keys_values(heads, widths)
    given = [x.clone().requires_grad_() for x in whole[:3]]
    mixed = causal_attention(*given, **options)
    expected = [mixed.detach(), *torch.autograd.grad(mixed, given, whole[3])]
    found = on_ranks(cp, attend_on_rank, cp, whole, options)
    for rank, ours in enumerate(found):
        places = own_positions(rank, cp, TOKENS // cp, CPU)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other[:, :, places], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 7, 36, 37])
@pytest.mark.parametrize("options", [{}, {"cap": 2.0}], ids=["plain", "capped"])
def test_the_last_queries_alone_attend_as_among_all(queries: int, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, heads, 37, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    among_all = causal_attention(q, k, v, **options)[:, :, -queries:]
    torch.testing.assert_close(causal_attention(q[:, :, -queries:], k, v, **options), among_all)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_every_token_is_on_one_rank_and_knows_its_position(cp: int) -> None:
    def on_rank(rank: int) -> torch.Tensor:
        tokens = own_tokens(torch.arange(12 * cp)[None], mesh_of(rank, cp=cp))
        dist.barrier()  # who has not joined yet needs the first rank
        return tokens

    found = on_ranks(cp, on_rank)
    assert torch.cat(found, dim=1).sort().values.tolist() == [list(range(12 * cp))]
    for rank, tokens in enumerate(found):
        positions = own_positions(rank, cp, 12, CPU) if cp > 1 else positions_in_order(12, CPU)
        assert tokens[0].tolist() == positions.tolist()


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_every_rank_has_the_same_work(cp: int) -> None:
    """Of a token as many units as it sees tokens, itself included."""
    work = [(own_positions(rank, cp, 64, CPU) + 1).sum().item() for rank in range(cp)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("architecture", ["llama", "grok1", "deepseek"])
def test_training_equals_one_process(tmp_path: Path, architecture: str) -> None:
    """Grouped queries, capped logits with a balance loss, and latent attention, on ranks with two sequences each."""
    config = changed(CONFIG, model=SMALL_MODELS[architecture], steps=3, lr=3e-4, mbs=2, gbs=4, ga=2)
    spread, alone = (trained(changed(config, cp=cp), tmp_path / f"cp {cp}") for cp in (2, 1))
    assert spread.farthest(alone) < 1e-5


def test_a_sequence_that_mamba_reads_in_order_is_not_split() -> None:
    config = changed(CONFIG, model=SMALL_MODELS["nemotron_h"], cp=2)
    with pytest.raises(ConfigError, match="a Mamba layer reads its sequence in order"):
        supported_workload(config)
