"""Training over gloo ranks that are forked from this process.

    outcome = trained(config, tmp_path)

The result has the losses and norms of rank 0, and the full state after the last step.
"""

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from config_changes import changed
from forked_ranks import on_ranks
from small_config import CONFIG
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.training_support import supported_training
from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig, Training
from llmb.events import StepDone, read
from llmb.models.architectures import Network
from llmb.runtime.checkpoint_folder import complete_checkpoints
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import ending_of
from llmb.train.loop import TrainJob, build_training, train
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import init_mesh


@dataclass(frozen=True)
class Trained:
    """Losses, norms and final state of a run over some ranks."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]  # full weights and optimizer state after the last step

    def max_distance(self, expected: "Trained") -> float:
        """Return the largest relative difference of any loss, norm or weight tensor (by its norm)."""
        return max(self.distances(expected))

    def distances(self, expected: "Trained") -> tuple[float, float, float]:
        """Return the largest relative difference of a loss, of a norm and of a weight tensor."""
        assert self.tensors.keys() == expected.tensors.keys()
        numbers = ((self.losses, expected.losses), (self.norms, expected.norms))
        losses, norms = (max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in numbers)
        weights = [name for name in expected.tensors if name.startswith("model.") and expected.tensors[name].numel()]
        return losses, norms, max(_difference(self.tensors[name], expected.tensors[name]) for name in weights)


def _difference(actual: Tensor, expected: Tensor) -> float:
    size = expected.norm().item()
    return (actual - expected).norm().item() / size if size else actual.norm().item()


def layout_config(model: Model, **changes: Any) -> RunConfig:
    """Return the small configuration of a model in a layout; micro-batches and GPUs follow from it."""
    config = changed(CONFIG, model=model, **changes)
    ga = config.workload.gbs // config.workload.mbs // config.parallel.dp
    return changed(config, ga=ga, gpus=config.parallel.world_size)


def build_job(config: RunConfig) -> tuple[TrainJob, list[Network], Optimizer]:
    """Return what trains the configuration on this rank."""
    return build_training(TrainJob(config, supported_training(config), init_mesh(config)))


def trained(config: RunConfig, folder: Path) -> Trained:
    """Train the configuration on as many ranks as it needs, in its own folder."""
    assert isinstance(config.workload, Training)
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, workload=replace(config.workload, checkpoint_every=config.workload.steps))
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    on_ranks(config.parallel.world_size, _train, config, folder)
    steps = [event for event in read(folder / "events.rank0.jsonl") if isinstance(event, StepDone)]
    (checkpoint,) = complete_checkpoints(folder / "checkpoints")
    return Trained([s.loss for s in steps], [s.grad_norm for s in steps], full_tensors(checkpoint))  # type: ignore[misc]


@cache
def outcome(model: Model, run: int = 0, **changes: Any) -> Trained:
    """Train the small configuration of a model in a layout; cached, unless `run` differs."""
    with TemporaryDirectory() as folder:
        return trained(layout_config(model, **changes), Path(folder))


def _train(rank: int, config: RunConfig, folder: Path) -> None:
    os.chdir(folder)
    recorder = EventRecorder(folder, rank)
    train(config, recorder)
    ending = ending_of(None)
    recorder.end(ending.status, ending.reason)


def full_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, however many ranks wrote it."""
    reader = dcp.FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(metadata.size, dtype=metadata.properties.dtype) for name, metadata in saved.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return tensors
