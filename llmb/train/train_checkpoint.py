"""Checkpoints of training, written asynchronously with torch.distributed.checkpoint; a resume is bit-exact.

Folders are handled by `llmb/runtime/checkpoint_folder.py`. Each rank writes its shards, and ranks of any other layout
read what they need: tensor names and global shapes do not depend on the layout. Saved are the weights (fp32 for every
dtype), the buffers, the optimizer state and the fp8 scaling history, which runs without delayed scaling ignore.
Batch and learning rate are functions of the step and training draws no random numbers, so there is no other state.

    llmb-run submit ... --set checkpoint_every=10        then        llmb-run submit ... --set resume=<run folder>
"""

import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError, LaunchError
from llmb.models.architectures import Network
from llmb.runtime import checkpoint_folder
from llmb.runtime.checkpoint_folder import FileChecksums
from llmb.runtime.checksums.checkpoint_checksums import CheckpointCheck, checksums, damaged_error
from llmb.runtime.faults.fault_injector import FaultInjector
from llmb.runtime.token_data import TokenFile
from llmb.train.checkpoint_identity import FORMAT, course, identity
from llmb.train.checkpoint_reader import CheckpointReader
from llmb.train.checkpoint_writer import CheckpointWriter
from llmb.train.chunked_tensor import (
    ChunkedTensor,
    bucket_tensors,
    chunk_values,
    replicated_tensor,
    with_chunk_values,
)
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh

FAILURES = (Exception, dcp.CheckpointException)  # which is not an Exception
SCALES = "scales."  # prefix of fp8 scaling history by tensor: optional on both sides

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended with one process


class RanksFailed(Exception):
    """Reasons of the ranks that failed, by rank, which all ranks raise."""

    def __init__(self, failures: dict[int, str]):
        super().__init__(next(iter(failures.values())))
        self.failures = failures


class Checkpointer:
    """Reader and writer of checkpoints: `load` before the first step, `after_step` each step; exit waits for writes."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        workload: Training,
        data: TokenFile | None,
        mesh: Mesh,
        model_parts: Sequence[Network],
        optimizer: Optimizer,
        faults: FaultInjector | None = None,
    ):
        self._folder = folder
        self._identity = identity(config) | course(config, workload, data)
        self._workload, self._mesh = workload, mesh
        self._model_parts, self._optimizer, self._faults = model_parts, optimizer, faults
        self._stager = BlockingAsyncStager(cache_staged_state_dict=mesh.device.type == "cuda")  # in pinned memory
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # Ranks coordinate a checkpoint in a thread, which must not interleave with training collectives.
        needs_group = workload.resume is not None or workload.checkpoint_every is not None
        self._group = dist.new_group(backend="gloo") if needs_group and mesh.world_size > 1 else None

    def load(self, path: Path) -> None:
        """Load the training state in place and check its files; raise ConfigError if one is damaged."""
        checking = CheckpointCheck(path, self._mesh.rank, self._mesh.world_size)
        self._optimizer.init_state()
        tensors = state_tensors(self._model_parts, self._optimizer)
        reader = CheckpointReader(path, checking)
        failure: BaseException | None = None
        try:
            saved = reader.read_metadata().state_dict_metadata
            for name in [name for name in tensors if name.startswith(SCALES) and name not in saved]:
                del tensors[name]  # computed anew
            _check_tensors(path, saved, tensors, self._all_names(tensors))
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        except ConfigError:
            raise
        except FAILURES as error:  # of all ranks: they load together
            failure = error
        damage = next(filter(None, self._gather(checking.damage())), None)
        if damage is not None:
            raise damaged_error(path, damage) from failure
        if failure is not None:
            raise ConfigError(f"resume: cannot read checkpoint {path}: {_reason(failure)}") from failure
        self._restore(tensors)

    @torch.no_grad()
    def _restore(self, tensors: dict[str, Tensor]) -> None:
        """Convert tensors that are saved in another format than they are held in."""
        for bucket in self._optimizer.buckets:
            for number, name in enumerate(bucket.names):
                weight = tensors[f"model.{name}"]
                assert isinstance(weight, ChunkedTensor)
                chunks = [values.flatten() for _, values in weight.chunks]
                if chunks:
                    bucket.set_own_part(number, chunks[0] if len(chunks) == 1 else torch.cat(chunks))
            bucket.invalidate()
            self._optimizer.steps = int(tensors[f"optimizer.{bucket.names[0]}.step"])
        saved_scales = {name.removeprefix(SCALES): x for name, x in tensors.items() if name.startswith(SCALES)}
        for model_part in self._model_parts:
            if model_part.fp8_scaling is not None:
                model_part.fp8_scaling.load_state_dict(saved_scales)

    def _all_names(self, tensors: dict[str, Tensor]) -> set[str]:
        """Return the tensor names of all ranks; pipeline ranks have different ones."""
        return set().union(*self._gather(sorted(tensors)))

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def after_step(self, step: int) -> None:
        """Start a checkpoint if one is due; the training thread blocks only while tensors are copied."""
        if self._writing is not None and self._writing.done():
            self._wait()  # a failed write ends the run at the next step, not at the next checkpoint
        if self._workload.checkpoint_every is None or step % self._workload.checkpoint_every:
            return
        self._wait()
        self._writing = self._writer.submit(self._write, step, self._stage())
        if self._faults is not None and self._faults.strikes_checkpoint(step):
            self._wait()

    def _stage(self) -> dict[str, Tensor]:
        """Return the state copied to the host."""
        tensors = state_tensors(self._model_parts, self._optimizer)
        chunks = {name: [*chunk_values(tensor)] for name, tensor in tensors.items()}
        staged = self._stager.stage(chunks)
        return {name: with_chunk_values(tensor, staged[name]) for name, tensor in tensors.items()}

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, _type: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        try:
            self._wait()
        except LaunchError:
            if error is None:  # else the run already fails for another reason
                raise
        finally:
            self._writer.shutdown()

    def _write(self, step: int, tensors: dict[str, Any]) -> None:
        final = checkpoint_folder.checkpoint_path(self._folder, step)
        is_rank0 = self._mesh.rank == 0
        try:
            if is_rank0:
                checkpoint_folder.create_partial(final)
            if self._group is not None:
                dist.barrier(self._group)  # else rank 0 could delete, as left by a killed run, what another one created
            writer = CheckpointWriter(checkpoint_folder.partial_path(final))
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            files = self._checksums(step, checkpoint_folder.partial_path(final))
            if is_rank0:
                checkpoint_folder.commit(final, self._identity, FORMAT, files)
        except FAILURES as error:
            checkpoint_folder.discard_partial(final)
            raise LaunchError(f"cannot write checkpoint {final}: {_reason(error)}", _only_failed_rank(error)) from error

    def _checksums(self, step: int, partial: Path) -> FileChecksums:
        """Return the checksums of the files of all ranks; each reads its own, which it has just written.

        If one rank fails, all do, for its reason: it must not delete the folder that others still read.
        """
        written = [
            *partial.glob(f"__{self._mesh.rank}_*"),
            *(partial.glob(".metadata") if self._mesh.rank == 0 else ()),
        ]
        files: FileChecksums = {}
        failure: OSError | None = None
        try:
            if self._faults is not None:
                self._faults.during_checkpoint(step, partial)
            files = checksums(written)
        except OSError as error:
            failure = error
        results = self._gather((files, None if failure is None else _reason(failure)))
        failures = {rank: reason for rank, (_, reason) in enumerate(results) if reason is not None}
        if failures:
            raise RanksFailed(failures) from failure
        return {name: checksum for rank_files, _ in results for name, checksum in rank_files.items()}


def state_tensors(model_parts: Sequence[Network], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor the next step depends on, by names that do not depend on the parallel layout."""
    tensors: dict[str, Tensor] = {}
    for bucket in optimizer.buckets:
        # On the host: a GPU may have no memory for a second copy in fp32.
        weights = bucket.master_weights().cpu()
        tensors |= {f"model.{name}": tensor for name, tensor in bucket_tensors(bucket, weights)}
        tensors |= {f"optimizer.{name}.step": torch.tensor(float(optimizer.steps)) for name in bucket.names}
    for bucket, kind, moment in optimizer.bucket_state():
        tensors |= {f"optimizer.{name}.{kind}": tensor for name, tensor in bucket_tensors(bucket, moment)}
    for name, weight in optimizer.replicated.items():
        tensors[f"model.{name}"] = replicated_tensor(weight, weight.detach())
    for name, kind, state in optimizer.replicated_state():
        tensor = replicated_tensor(optimizer.replicated[name], state) if state.ndim else state
        tensors[f"optimizer.{name}.{kind}"] = tensor
    for model_part in model_parts:
        tensors |= {f"model.{name}": buffer for name, buffer in model_part.named_buffers()}
        if model_part.fp8_scaling is not None:
            scales = model_part.fp8_scaling.state_dict()
            tensors |= {f"{SCALES}{name}": tensor for name, tensor in scales.items()}
    return tensors


def _check_tensors(path: Path, saved: dict[str, Any], tensors: dict[str, Tensor], names: set[str]) -> None:
    """Check that checkpoint and run have the same tensor names, and this rank's tensors the same shapes and dtypes."""
    for name in sorted(name for name in saved.keys() ^ names if not name.startswith(SCALES)):
        owner, peer = ("checkpoint", "run") if name in saved else ("run", "checkpoint")
        raise ConfigError(f"resume: {path}: the {owner} has a tensor {name}, the {peer} has none")
    for name, tensor in tensors.items():
        metadata = saved[name]
        if not isinstance(metadata, TensorStorageMetadata):
            raise ConfigError(f"resume: {path}: {name} is not a tensor in the checkpoint")
        saved_type, run_type = f"{[*metadata.size]} {metadata.properties.dtype}", f"{[*tensor.shape]} {tensor.dtype}"
        is_cast = name.startswith("optimizer.") and metadata.size == tensor.shape  # moments of another dtype
        if saved_type != run_type and not is_cast:
            raise ConfigError(f"resume: {path}: {name} is {saved_type} in the checkpoint and {run_type} in this run")


def _only_failed_rank(error: BaseException) -> int | None:
    """Return the rank that failed where all know of it; none if several did, or nobody else knows."""
    if isinstance(error, (dcp.CheckpointException, RanksFailed)) and len(error.failures) == 1:
        return next(iter(error.failures))
    return None


def _reason(error: BaseException) -> str:
    """Return the reason in one line: the error of the first failed rank where they are gathered."""
    if isinstance(error, dcp.CheckpointException):
        return _reason(error.failures[min(error.failures)][0])
    return checkpoint_folder.root_cause(error)
