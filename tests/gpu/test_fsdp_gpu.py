"""Gathering and reducing over NCCL, on a rank that is its own peer: streams and CUDA graphs change no loss."""

from dataclasses import replace

import pytest
from cuda_checks import GPU, NEEDS_GPU
from small_models import llama_model
from training_run import losses_and_norms, run_config

from llmb.config.spec import Parallel, Training
from llmb.train.cuda_graphs import MicroBatchGraph
from llmb.train.parallel.mesh import Mesh, build_mesh

pytestmark = NEEDS_GPU

MODEL = llama_model(layers=4, hidden=256, ffn=512, vocab=1024)
WORK = Training(seqlen=256, mbs=2, gbs=6, ga=3, steps=6, window=(5, 6), lr=1e-5, lr_warmup_steps=2)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_collectives_of_one_rank_change_no_loss(nccl: None, dtype: str, fsdp: bool, graphs: bool) -> None:
    config = run_config(MODEL, dtype, WORK)
    expected = losses_and_norms(config, Mesh(0, 1, GPU))
    parallel = Parallel(fsdp=fsdp)
    mesh = build_mesh(0, GPU, parallel, experts=False)
    actual = losses_and_norms(replace(config, parallel=parallel), mesh, MicroBatchGraph() if graphs else None)
    for step, (loss, reference) in enumerate(zip(actual, expected, strict=True), start=1):
        assert loss == pytest.approx(reference, rel=1e-3 if dtype == "bf16" else 1e-2), step
