"""Training over gloo ranks that are forked from this process, which has torch in memory already: they start at once.

    outcome = trained(config, tmp_path)      # every rank's events, and the state after the last step as whole tensors

Ranks are judged by what they wrote: gloo may abort a process that has done all its work.
"""

import io
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from llmb.events import StepDone, read
from llmb.plain import to_plain
from llmb.rank.endings import ending
from llmb.rank.record import Record
from llmb.spec import RunConfig, Training
from llmb.train.checkpoint import complete
from llmb.train.loop import train

LIMIT_S = 300
LINGER_S = 3


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


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `work(rank, *arguments)` in that many processes, which can form a process group; what each returned."""
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [os.pipe() for _ in range(world)]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            for other, (_, writer) in enumerate(pipes):
                if other != rank:
                    os.close(writer)  # whoever reads the other's answer waits until all have closed it
            _be_rank(rank, world, port, pipes[rank][1], work, arguments)
        pids.append(pid)
    try:
        for _, writer in pipes:
            os.close(writer)
        return [_answer(rank, reader) for rank, (reader, _) in enumerate(pipes)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_rank(rank: int, world: int, port: int, writer: int, work: Callable[..., Any], arguments: Any) -> None:
    """The life of a forked process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    signal.alarm(LIMIT_S)
    answer = io.BytesIO()
    try:
        torch.save((True, work(rank, *arguments)), answer)
    except BaseException:
        answer = io.BytesIO()
        torch.save((False, traceback.format_exc()), answer)
        time.sleep(0.5)  # those who fail because of this one should not be heard first
    data = answer.getvalue()
    while data:
        data = data[os.write(writer, data) :]
    os.close(writer)
    time.sleep(LINGER_S)  # who leaves at once breaks the others' last exchange; ends when all have answered
    os._exit(0)


def _answer(rank: int, reader: int) -> Any:
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    assert data, f"rank {rank} died without a word"
    good, value = torch.load(io.BytesIO(data), weights_only=False)
    assert good, f"rank {rank}:\n{value}"
    return value
