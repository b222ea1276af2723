"""Checkpoints of out-of-core training: every parameter bucket with its optimizer state, bit for bit, a file each.

    identity = checkpoint_identity(model, plan, workload, data)
    point = resume_point(workload, folder, identity)        # then tensors = load(point.path, bucket) for every bucket
    scales = load_scales(point.path)                        # none: not fp8, or an older checkpoint
    save(folder, step, ((bucket, tensors) for ...), identity, scales)

Nothing in it depends on how the plan divides a step, so a run may be resumed with other budgets. The dtype and the
rounding of updates must be the same: they decide what state there is. No update of the step may be pending. In fp8 the
history of the scales has a file of its own; a run that resumes without it measures them anew, and rounds differently.
With LoRA there is one file, of the adapters: frozen weights are initialised or loaded again.
Training is stopped meanwhile, since the host has no capacity for a second copy: each bucket is written from where it
is. Commit and retention are in `llmb/runtime/checkpoint_folder.py`.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.config.serialization import to_plain
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError, LaunchError
from llmb.runtime import checkpoint_folder
from llmb.runtime.checksums.checkpoint_checksums import checksums
from llmb.runtime.token_data import TokenFile, data_course

FORMAT = 1  # incremented whenever a tensor of the same name changes its meaning
SCALES = "scales.safetensors"
REQUIRED = ("model.", "dtype", "update", "lora.")  # beginnings of the names that decide which tensors there are

CheckpointIdentity = dict[str, Any]


def checkpoint_identity(model: Model, plan: Plan, workload: OutOfCore, data: TokenFile | None) -> CheckpointIdentity:
    """Return what determines a checkpoint's values: model shape, dtypes, order of the data, and learning rate."""
    shape = {f"model.{name}": value for name, value in to_plain(model).items() if name != "name"}
    dtypes = {"dtype": plan.dtype, "fp8_recipe": plan.recipe, "update": plan.update, "pack": workload.pack}
    return shape | dtypes | _lora_identity(workload, plan) | data_course(workload, plan.gbs, data)


def _lora_identity(workload: OutOfCore, plan: Plan) -> CheckpointIdentity:
    """Return the same of adapters and of the weights that they adapt; nothing without LoRA."""
    if plan.lora is None:
        return {}
    settings = {f"lora.{name}": value for name, value in asdict(plan.lora).items()}
    return settings | {"lora.targets": ",".join(plan.lora.targets), "weights": workload.weights}


def resume_point(
    workload: OutOfCore, folder: Path, identity: CheckpointIdentity
) -> checkpoint_folder.ResumePoint | None:
    """Return where a run in this folder resumes, checked against its identity; none: a new run."""
    if workload.resume is not None and "lora.rank" not in identity:
        path = checkpoint_folder.latest_checkpoint(Path(workload.resume))
        if (rank := checkpoint_folder.read_identity(path).get("lora.rank")) is not None:
            raise ConfigError(f"resume: {path} holds LoRA adapters only; set lora_rank={rank} to continue")
    required = {name: value for name, value in identity.items() if name.startswith(REQUIRED)}
    expected = {name: value for name, value in identity.items() if name not in required}
    return checkpoint_folder.resume_point(workload, folder, required, expected, FORMAT)


def save(
    folder: Path,
    step: int,
    buckets: Iterable[tuple[int, dict[str, Tensor]]],
    identity: CheckpointIdentity,
    scales: dict[str, Tensor] | None = None,
) -> None:
    """Write the checkpoint of a step to a run folder; durable when this returns, the older ones stay until then."""
    final = checkpoint_folder.checkpoint_path(folder, step)
    written = 0
    try:
        partial = checkpoint_folder.create_partial(final)
        with ThreadPoolExecutor(max_workers=1) as reader:  # the checksum of a file while the next is written
            futures = []
            for bucket, tensors in buckets:
                written += _write(_file(partial, bucket), tensors)
                futures.append(reader.submit(checksums, [_file(partial, bucket)]))
            if scales is not None:
                written += _write(partial / SCALES, scales)
                futures.append(reader.submit(checksums, [partial / SCALES]))
            files = {name: file for future in futures for name, file in future.result().items()}
        checkpoint_folder.commit(final, identity, FORMAT, files)
    except (OSError, SafetensorError, LaunchError) as error:
        checkpoint_folder.discard_partial(final)
        cause = checkpoint_folder.root_cause(error)
        raise LaunchError(f"cannot write checkpoint {final}: {cause} after {written / 1e9:.2f} GB of it") from error


def load(path: Path, bucket: int) -> dict[str, Tensor]:
    """Return the tensors of a bucket, as they were given to `save`."""
    return _read(_file(path, bucket))


def load_scales(path: Path) -> dict[str, Tensor] | None:
    """Return the scales that were given to `save`."""
    file = path / SCALES
    return _read(file) if file.exists() else None


def _write(file: Path, tensors: dict[str, Tensor]) -> int:
    """Write a file durably and return its bytes."""
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, file)
    checkpoint_folder.fsync(file)
    return file.stat().st_size


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume: cannot read checkpoint {file}: {checkpoint_folder.root_cause(error)}") from error


def _file(checkpoint: Path, bucket: int) -> Path:
    return checkpoint / f"unit_{bucket:04}.safetensors"
