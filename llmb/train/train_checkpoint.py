"""Checkpoints: all that the next step depends on, written while training goes on, resumed bit for bit.

How their folders come about is in `llmb/runtime/checkpoint_folder.py`. The format is that of torch.distributed.checkpoint:
each rank writes its share, and ranks in any other layout read what they need of the whole: tensors have the same names
and whole shapes in all of them.
The tensors are the weights (fp32 in every number format), the buffers, the optimizer's state, and what layers in fp8
remember of the sizes of their tensors, which layouts that find these afresh do without. Batch and learning rate follow
from the step's number and training draws no random numbers, so nothing else need be kept.

    llmb-run submit ... --set checkpoint_every=10        then        llmb-run submit ... --set resume=<run folder>
"""

import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError, LaunchError
from llmb.runtime import checkpoint_folder
from llmb.train.fused_llama import scales_of
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh

Parts = Sequence[nn.Module]
FAILURES = (Exception, dcp.CheckpointException)  # torch's own is no Exception
SCALES = "scales."  # of 8-bit tensors, where layers remember them: a run without takes none, one with has its own
FORMAT = 2  # raised whenever a tensor of the same name and shape comes to mean something else; 1 was not written down

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: as intended


def resume_point(config: RunConfig, work: Training, folder: Path) -> Path | None:
    """The checkpoint that a run in this folder goes on from, checked against its configuration; none: a new run."""
    return checkpoint_folder.resume_point(work, folder, identity(config, work), FORMAT)


class Checkpoints:
    """Those of one run: `load` before the first step, `after` each step; leaving waits for what is being written."""

    def __init__(self, folder: Path, config: RunConfig, work: Training, mesh: Mesh, parts: Parts, optimizer: Optimizer):
        self._folder = folder
        self._config, self._work, self._mesh = config, work, mesh
        self._parts, self._optimizer = parts, optimizer
        self._stager = BlockingAsyncStager(cache_staged_state_dict=mesh.device.type == "cuda")  # cached: pinned memory
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # Ranks agree on a checkpoint in the background, which must not mix with what training says between GPUs.
        wanted = work.resume is not None or work.checkpoint_every is not None
        self._group = dist.new_group(backend="gloo") if wanted and mesh.world_size > 1 else None

    def load(self, path: Path) -> None:
        """Read the state of training, in place."""
        self._optimizer.make_state()
        tensors = state_tensors(self._parts, self._optimizer)
        reader = dcp.FileSystemReader(path)
        try:
            saved = reader.read_metadata().state_dict_metadata
            for name in [name for name in tensors if name.startswith(SCALES) and name not in saved]:
                del tensors[name]  # they are found afresh
            _check_tensors(path, saved, tensors, self._names(tensors))
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
            self._settle(tensors)
        except ConfigError:
            raise
        except FAILURES as error:
            raise ConfigError(f"resume: cannot read checkpoint {path}: {_cause(error)}") from error

    def _settle(self, tensors: dict[str, Tensor]) -> None:
        """What is kept in other forms than it is written in."""
        for name in self._optimizer.halves.weights:
            self._optimizer.halves.restore(name, tensors[f"model.{name}"], tensors[f"optimizer.{name}.step"])
        kept = {name.removeprefix(SCALES): tensor for name, tensor in tensors.items() if name.startswith(SCALES)}
        if (scales := scales_of(self._parts)) is not None and kept:
            scales.restore(kept)

    def _names(self, tensors: dict[str, Tensor]) -> set[str]:
        """Those of all ranks: of a pipeline each has its own."""
        if self._group is None:
            return set(tensors)
        names: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(names, sorted(tensors), group=self._group)
        return set().union(*names)

    def after(self, step: int) -> None:
        """Begin a checkpoint where one is due; the training thread waits only while the tensors are copied."""
        if self._writing is not None and self._writing.done():
            self._wait()  # a write that failed ends the run at the next step, not at the next checkpoint
        if self._work.checkpoint_every is None or step % self._work.checkpoint_every:
            return
        self._wait()
        tensors = self._stager.stage(state_tensors(self._parts, self._optimizer))
        self._writing = self._writer.submit(self._write, step, tensors)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _type: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        try:
            self._wait()
        except LaunchError:
            if error is None:  # otherwise the run already ends, for a reason of its own
                raise
        finally:
            self._writer.shutdown()

    def _write(self, step: int, tensors: dict[str, Any]) -> None:
        final = checkpoint_folder.place_of(self._folder, step)
        first = self._mesh.rank == 0
        try:
            if first:
                checkpoint_folder.begin(final)
            writer = dcp.FileSystemWriter(checkpoint_folder.partial_of(final))
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            if first:
                checkpoint_folder.finish(final, identity(self._config, self._work), FORMAT)
        except FAILURES as error:
            checkpoint_folder.give_up(final)
            raise LaunchError(f"cannot write checkpoint {final}: {_cause(error)}") from error


def identity(config: RunConfig, work: Training) -> dict[str, Any]:
    """What must be the same for a run to go on as if never interrupted: shapes, number format, and the data's order."""
    shape = {f"model.{name}": value for name, value in to_plain(config.model).items() if name != "name"}
    data = {name: getattr(work, name) for name in ("seqlen", "gbs", "seed")}
    return shape | {"dtype": config.precision.dtype} | data


def state_tensors(parts: Parts, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor the next step depends on, by names that do not depend on how the model is split."""
    tensors = {f"model.{name}": tensor for part in parts for name, tensor in part.state_dict().items()}
    # In the memory of the host: a GPU that holds both halves of all weights may have no room for the whole ones.
    tensors |= {f"model.{name}": weight.whole().cpu() for name, weight in optimizer.halves.weights.items()}
    if (scales := scales_of(parts)) is not None:
        tensors |= {f"{SCALES}{name}": tensor for name, tensor in scales.kept().items()}
    for name, state in optimizer.state().items():
        for kind, tensor in state.items():
            tensors[f"optimizer.{name}.{kind}"] = tensor
    return tensors


def _check_tensors(path: Path, saved: dict[str, Any], tensors: dict[str, Tensor], names: set[str]) -> None:
    """The checkpoint has all the names of the run and no others, and this rank's tensors with their whole shapes."""
    for name in sorted(name for name in saved.keys() ^ names if not name.startswith(SCALES)):
        have, lack = ("checkpoint", "run") if name in saved else ("run", "checkpoint")
        raise ConfigError(f"resume: {path}: the {have} has a tensor {name}, the {lack} has none")
    for name, tensor in tensors.items():
        there = saved[name]
        if not isinstance(there, TensorStorageMetadata):
            raise ConfigError(f"resume: {path}: {name} is no tensor there")
        was, now = f"{[*there.size]} {there.properties.dtype}", f"{[*tensor.shape]} {tensor.dtype}"
        if was != now:
            raise ConfigError(f"resume: {path}: {name} is {was} there and {now} in this run")


def _cause(error: BaseException) -> str:
    """Why, in one line: the first rank's error where torch gathered them."""
    if isinstance(error, dcp.CheckpointException):
        return _cause(error.failures[min(error.failures)][0])
    return checkpoint_folder.cause(error)
