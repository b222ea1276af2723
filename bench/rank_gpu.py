"""What does parallelism cost the compute of a rank? One rank of a layout on one GPU, against one GPU alone.

    python bench/rank_gpu.py [--row "8b tp2"] [--json FILE]
    python bench/rank_gpu.py --tiny             # very small models, with or without a GPU: shows only that it runs

A rank is built as in training, by the same passes, in a process group without other ranks
(`llmb/runtime/local_group.py`), so nothing waits for a network. What a collective delivers is copied inside the
device's memory instead, the least that it takes of a GPU. (Without any copies GEMMs would work on whatever is in
memory, and such numbers cost less power.) The peer is the same engine on one GPU alone: the same model, or for tp,
whose GEMMs are narrower, a model of the shard's sizes. Both run micro-batches forward and backward, a few layers of the
model; the rate is that of the FLOPs that they compute.
"""

import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from measure.bench_report import BenchReport
from measure.device import describe_machine, gpu_name, release_memory
from measure.device_timer import time_sustained
from measure.options import build_parser, parse_options, select_rows
from torch import Tensor
from training.train_rows import GROK, LLAMA, NEMOTRON

from llmb.config.model import Model
from llmb.config.recipe import load_all, shipped
from llmb.config.serialization import convert
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.perfmodel.shards import rank_flops
from llmb.runtime.local_group import LOCAL
from llmb.train.llama_layers import begin_step
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import Mesh, build_mesh
from llmb.train.parallel.pipeline import stage_boundary_tensor
from llmb.train.parallelize import build_model_parts

AIM, FLOOR = 0.97, 0.92
SECONDS = 3.0  # of micro-batches, one after the other
WARMUP = 3  # micro-batches


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rank of a layout."""

    workload: str
    size: str
    layers: int
    parallel: Parallel
    seqlen: int = 8192
    dtype: str = "bf16"
    stage: int = 0  # of the pipeline

    @property
    def title(self) -> str:
        degrees = {name: getattr(self.parallel, name) for name in ("dp", "tp", "pp", "cp", "ep")}
        layout = " ".join(f"{name}{ranks}" for name, ranks in degrees.items() if ranks > 1)
        return f"{self.size} {'fsdp ' * self.parallel.fsdp}{layout} {self.dtype}"


CASES = (
    Row(workload=LLAMA, size="8b", layers=8, parallel=Parallel(dp=8, fsdp=True)),
    Row(workload=LLAMA, size="8b", layers=8, parallel=Parallel(dp=8)),
    Row(workload=LLAMA, size="8b", layers=8, parallel=Parallel(tp=2)),
    Row(workload=LLAMA, size="8b", layers=8, parallel=Parallel(cp=2), seqlen=16384),
    Row(workload=LLAMA, size="70b", layers=4, parallel=Parallel(dp=8, fsdp=True)),
    Row(workload=LLAMA, size="70b", layers=32, parallel=Parallel(tp=4, pp=8), stage=3),
    Row(workload=GROK, size="314b", layers=2, parallel=Parallel(dp=8, ep=8)),
    Row(workload=NEMOTRON, size="56b", layers=14, parallel=Parallel(tp=8)),
)
ROWS = tuple(replace(row, dtype=dtype) for row in CASES for dtype in ("bf16", "fp8"))


def model_of(row: Row, tiny: bool) -> Model:
    """Return the model of a row, with its first layers only."""
    model = convert(Model, load_all([shipped()])[row.workload].models[row.size], row.size)
    pattern = None if model.pattern is None else model.pattern[: row.layers]
    model = replace(model, layers=row.layers, pattern=pattern)
    if tiny:
        model = replace(model, hidden=256, ffn=512, vocab=1024, heads=16, kv_heads=8, head_dim=32)
        if model.experts is not None:
            model = replace(model, experts=replace(model.experts, ffn=128))
        if model.mamba is not None:
            model = replace(model, mamba=replace(model.mamba, heads=16, head_dim=32, groups=8, state=16, chunk=64))
    return model


def shard_model(model: Model, row: Row) -> Model:
    """Return a model of the sizes that a rank has: of a stage its layers, of tp its heads, channels and vocabulary."""
    tp, layers = row.parallel.tp, model.layers // row.parallel.pp
    mamba = model.mamba and replace(model.mamba, heads=model.mamba.heads // tp, groups=model.mamba.groups // tp)
    return replace(
        model, layers=layers, pattern=model.pattern and model.pattern[:layers], heads=model.heads // tp,
        kv_heads=model.kv_heads // tp, ffn=model.ffn // tp, vocab=model.vocab // tp, mamba=mamba,
    )  # fmt: skip


def config_of(row: Row, model: Model, parallel: Parallel, gpu: str, tiny: bool) -> RunConfig:
    """Return the configuration of one micro-batch a step."""
    balanced = model.experts is not None
    seqlen = row.seqlen // 64 if tiny else row.seqlen
    return RunConfig(
        name="rank", target=row.workload, size=row.size,
        machine=Machine(gpu=gpu, gpus=parallel.world_size, gpus_per_node=8), model=model, parallel=parallel,
        precision=Precision(dtype=row.dtype),  # type: ignore[arg-type]
        workload=Training(
            seqlen=seqlen, mbs=1, gbs=2 * parallel.dp, ga=2, balanced_experts=balanced
        ),
    )  # fmt: skip


def micro_batch_seconds(config: RunConfig, mesh: Mesh, tiny: bool) -> float:
    """Return the seconds of a micro-batch, forward and backward."""
    work = config.workload
    assert isinstance(work, Training)
    (part,) = build_model_parts(config, work, mesh)
    sharded = sharded_parameters(part)
    begin_step(part)
    tokens = torch.randint(config.model.vocab, (1, work.seqlen // mesh.size("cp")), device=mesh.device)
    boundary = stage_boundary_tensor(config, work, mesh)

    def residual(requires_grad: bool) -> Tensor:
        x = torch.randn(boundary.shape, device=mesh.device, dtype=boundary.dtype)
        return x.requires_grad_(requires_grad)

    received, gradient = residual(True), residual(False)

    def micro_batch() -> None:
        sharded.begin_backward(last=False)
        out = part(tokens if part.first else received, tokens if part.last else None)
        out.backward(None if part.last else gradient)
        sharded.end_backward()

    for _ in range(WARMUP):
        micro_batch()
    seconds = time_sustained(micro_batch, mesh.device, 0.0 if tiny else SECONDS)
    sharded.zero_grad()
    return seconds


def rate(config: RunConfig, seconds: float, stage: int = 0) -> float:
    """Return the FLOP/s of a rank; `rank_flops` counts a step of two micro-batches."""
    return rank_flops(config, stage) / 2 / seconds


def rank_rate(row: Row, model: Model, gpu: str, device: torch.device, tiny: bool) -> float:
    """Return the FLOP/s of one rank of the layout."""
    config = config_of(row, model, row.parallel, gpu, tiny)
    ranks = row.parallel.world_size
    rank = row.stage * ranks // row.parallel.pp
    dist.init_process_group(LOCAL, rank=rank, world_size=ranks, store=dist.HashStore())
    try:
        mesh = build_mesh(rank, device, row.parallel, experts=model.experts is not None)
        return rate(config, micro_batch_seconds(config, mesh, tiny), row.stage)
    finally:
        dist.destroy_process_group()


def alone_rate(row: Row, model: Model, gpu: str, device: torch.device, tiny: bool) -> float:
    """Return the FLOP/s of the peer."""
    shard = shard_model(model, row)
    if model.experts is not None and row.parallel.ep > 1:
        shard = replace(shard, layers=1)  # one GPU has no memory for the experts of more
    config = config_of(row, shard, Parallel(), gpu, tiny)
    return rate(config, micro_batch_seconds(config, Mesh(0, 1, device), tiny))


HEADER = ("row", "alone TFLOP/s", "rank TFLOP/s", "ratio", "aim", "floor")


def main() -> int:
    parser = build_parser(__doc__, ("rates",))
    options = parse_options(parser, ("rates",), ROWS)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report, gpu = BenchReport(json=options.json), gpu_name(device)
    print(describe_machine(device), flush=True)
    lines = []
    for row in select_rows(ROWS, options.row):
        model = model_of(row, options.tiny)
        alone = alone_rate(row, model, gpu, device, options.tiny)
        release_memory(device)
        rank = rank_rate(row, model, gpu, device, options.tiny)
        release_memory(device)
        lines.append((row.title, f"{alone / 1e12:.1f}", f"{rank / 1e12:.1f}", f"{rank / alone:.3f}", AIM, FLOOR))
        report.record("ranks", {"row": row.title, "alone": alone, "rank": rank, "ratio": rank / alone})
        print("  ".join(map(str, lines[-1])), flush=True)
    report.print_table("One rank of a layout against one GPU", HEADER, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
