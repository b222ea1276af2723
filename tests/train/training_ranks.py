"""Training over gloo ranks that are forked from this process.

    outcome = trained(config, tmp_path)

It has the losses and norms of rank 0, and the state after the last step as whole tensors.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import on_ranks
from torch import Tensor

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig, Training
from llmb.events import StepDone, read
from llmb.runtime.checkpoint_folder import complete
from llmb.runtime.recorder import Record
from llmb.runtime.run_ending import ending
from llmb.train.loop import train


@dataclass(frozen=True)
class Trained:
    """What a run over some ranks left behind."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]  # weights and optimizer state after the last step, whole

    def farthest(self, other: "Trained") -> float:
        """The largest relative difference of any loss, norm or weight; a weight's is by the size of its tensor."""
        return max(self.distances(other))

    def distances(self, other: "Trained") -> tuple[float, float, float]:
        """The largest of a loss, of a norm and of a weight."""
        assert self.tensors.keys() == other.tensors.keys()
        numbers = ((self.losses, other.losses), (self.norms, other.norms))
        losses, norms = (max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in numbers)
        weights = [name for name in other.tensors if name.startswith("model.") and other.tensors[name].numel()]
        return losses, norms, max(_difference(self.tensors[name], other.tensors[name]) for name in weights)


def _difference(mine: Tensor, other: Tensor) -> float:
    size = other.norm().item()
    return (mine - other).norm().item() / size if size else mine.norm().item()


def trained(config: RunConfig, folder: Path) -> Trained:
    """Train the configuration on as many ranks as it spreads over, in a folder of its own."""
    assert isinstance(config.workload, Training)
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, workload=replace(config.workload, checkpoint_every=config.workload.steps))
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    on_ranks(config.parallel.world_size, _train, config, folder)
    steps = [event for event in read(folder / "events.rank0.jsonl") if isinstance(event, StepDone)]
    (checkpoint,) = complete(folder / "checkpoints")
    return Trained([s.loss for s in steps], [s.grad_norm for s in steps], whole_tensors(checkpoint))  # type: ignore[misc]


def _train(rank: int, config: RunConfig, folder: Path) -> None:
    os.chdir(folder)
    record = Record(folder, rank)
    train(config, record)
    end = ending(None)
    record.end(end.status, end.reason)


def whole_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, however many ranks wrote it."""
    reader = dcp.FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(there.size, dtype=there.properties.dtype) for name, there in saved.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return tensors
