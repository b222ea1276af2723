"""Training runs in this process: each begins without the memory of the one before.

steps, ended = train(run_config(model, "bf16", Training(...)), tmp_path / "run")
"""

import gc
import json
from pathlib import Path

import torch

from llmb.config.model import Model
from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training, Workload
from llmb.events import RunEnded, StepDone, read
from llmb.runtime.recorder import EventRecorder
from llmb.train.__main__ import run
from llmb.train.cuda_graphs import MicroBatchGraph
from llmb.train.loop import TrainJob, build_training, train_step
from llmb.train.parallel.mesh import Mesh


def run_config(model: Model, dtype: str, workload: Workload) -> RunConfig:
    """Return a configuration for one GPU."""
    return RunConfig(
        name="gpu",
        target="pretrain_llama3.1",
        size="8b",
        proxy="small",
        machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
        model=model,
        parallel=Parallel(),
        precision=Precision(dtype=dtype),  # type: ignore[arg-type]
        workload=workload,
    )


def train(config: RunConfig, folder: Path) -> tuple[list[StepDone], RunEnded]:
    """Return the steps of a run and how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    gc.collect()  # the previous run
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(folder / "config.json", EventRecorder(folder, 0))
    *events, ended = read(folder / "events.rank0.jsonl")
    assert isinstance(ended, RunEnded)
    return [event for event in events if isinstance(event, StepDone)], ended


def train_to_the_end(config: RunConfig, folder: Path) -> list[StepDone]:
    """Return the steps of a run, which must end well."""
    steps, ended = train(config, folder)
    assert (ended.status, ended.reason) == ("ok", None)
    return steps


def losses_and_norms(config: RunConfig, mesh: Mesh, graph: MicroBatchGraph | None = None) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step, without the files of a run."""
    assert isinstance(config.workload, Training)
    job, parts, optimizer = build_training(TrainJob(config, config.workload, mesh, graph=graph))
    return [train_step(job, parts, optimizer, step) for step in range(1, config.workload.steps + 1)]
