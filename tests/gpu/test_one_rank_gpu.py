"""Collectives of one rank on a GPU, over NCCL as its own peer or as copies: on its streams, and in CUDA graphs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cuda_checks import GPU, NEEDS_GPU
from small_models import grok1_model, llama_model
from training_run import losses_and_norms, run_config, train_to_the_end

from llmb.config.model import Model, MoEConfig
from llmb.config.spec import Machine, OneRank, Parallel, RunConfig, Training
from llmb.runtime.local_group import LOCAL
from llmb.train.cuda_graphs import MicroBatchGraph
from llmb.train.parallel.mesh import Mesh, build_mesh

pytestmark = NEEDS_GPU

SIZES: dict[str, Any] = {"hidden": 256, "ffn": 512, "vocab": 1024}
LLAMA = llama_model(layers=4, **SIZES)
GROK = grok1_model(experts=MoEConfig(count=8, top_k=2, ffn=256), tied_embeddings=False, **SIZES)
WORK = Training(seqlen=256, mbs=2, gbs=6, ga=3, steps=6, window=(5, 6), lr=1e-5, lr_warmup_steps=2)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def one_rank(model: Model, dtype: str, parallel: Parallel, rank: int = 0) -> RunConfig:
    work = replace(WORK, gbs=WORK.mbs * WORK.ga * parallel.dp, balanced_experts=model.experts is not None)
    config = run_config(model, dtype, work)
    here = Machine(gpu="h200", gpus=1, gpus_per_node=1)
    machine = replace(config.machine, gpus=parallel.world_size)
    return replace(config, parallel=parallel, machine=machine, one_rank=OneRank(rank=rank, machine=here))


def steps_of(config: RunConfig, graph: MicroBatchGraph | None) -> list[tuple[float, float]]:
    """Return the loss and gradient norm that the rank itself computes."""
    assert config.one_rank is not None
    rank, ranks = config.one_rank.rank, config.parallel.world_size
    dist.init_process_group(LOCAL, rank=rank, world_size=ranks, store=dist.HashStore())
    mesh = build_mesh(rank, GPU, config.parallel, experts=config.model.experts is not None)
    result = losses_and_norms(config, mesh, graph)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_nccl_with_one_rank_changes_no_loss(nccl: None, dtype: str, fsdp: bool, graphs: bool) -> None:
    config, parallel = run_config(LLAMA, dtype, WORK), Parallel(fsdp=fsdp)
    expected = losses_and_norms(config, Mesh(0, 1, GPU))
    mesh = build_mesh(0, GPU, parallel, experts=False)
    actual = losses_and_norms(replace(config, parallel=parallel), mesh, MicroBatchGraph() if graphs else None)
    for step, (loss, reference) in enumerate(zip(actual, expected, strict=True), start=1):
        assert loss == pytest.approx(reference, rel=1e-3 if dtype == "bf16" else 1e-2), step


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (LLAMA, Parallel(dp=4, fsdp=True)),
        (LLAMA, Parallel(dp=4)),
        (LLAMA, Parallel(tp=2, dp=2)),
        (GROK, Parallel(tp=2, ep=4, dp=4)),
    ],
    ids=["fsdp", "zero1", "tp", "ep"],
)
def test_graphs_capture_the_copies(model: Model, parallel: Parallel, dtype: str) -> None:
    config = one_rank(model, dtype, parallel)
    eager = steps_of(config, None)
    graphed = steps_of(config, MicroBatchGraph())
    for step, (actual, expected) in enumerate(zip(graphed, eager, strict=True), start=1):
        assert actual == pytest.approx(expected, rel=1e-3 if dtype == "bf16" else 2e-2), step


@pytest.mark.parametrize(
    ("parallel", "rank", "graphs"),
    [
        (Parallel(dp=4, fsdp=True), 1, True),
        (Parallel(tp=2, pp=4), 4, False),
        (Parallel(tp=2, pp=2, vp=2, cp=2), 4, False),
    ],
    ids=["fsdp, graphs", "middle of a pipeline", "last of an interleaved pipeline with cp"],
)
def test_a_run_ends_ok(tmp_path: Path, parallel: Parallel, rank: int, graphs: bool) -> None:
    config = one_rank(LLAMA, "fp8", parallel, rank)
    assert isinstance(config.workload, Training)
    work = replace(config.workload, cuda_graphs=graphs, ga=4, gbs=8 * parallel.dp)
    steps = train_to_the_end(replace(config, workload=work), tmp_path)
    assert [step.loss for step in steps] == [None] * WORK.steps
    assert all(step.seconds for step in steps)
