"""Checkpoints of out-of-core training: every unit of weights with its optimizer state, bit for bit, a file each.

    facts = facts_of(model, plan, work, data, pack)
    path = resume_point(work, folder, facts)          # then tensors = load(path, unit) for every unit
    scales = load_scales(path)                        # none: not fp8, or made before these were kept
    save(folder, step, ((unit, tensors) for ...), facts, scales)

Nothing in it depends on how the plan cuts the work, so a run may go on under other budgets. The number format and how
weights take their updates must be the same: they decide what state there is. All updates of the step must be made.
In fp8 the scales' history lies in a file of its own; a run that resumes without it measures them anew, and rounds
differently for it. Training waits meanwhile, since the host has no room for a second copy: each unit goes from where
it lives to the disk. How the folders come about is in `llmb/runtime/checkpoint_folder.py`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmb.config.offload_plan import Plan
from llmb.config.serialization import to_plain
from llmb.config.spec import Model
from llmb.errors import ConfigError, LaunchError
from llmb.runtime import checkpoint_folder
from llmb.runtime.checkpoint_folder import Resumable
from llmb.runtime.learning_rate import Schedule
from llmb.runtime.token_data import TokenFile

FORMAT = 1  # raised whenever a tensor of the same name comes to mean something else
SCALES = "scales.safetensors"
SCHEDULE = ("lr", "lr_warmup_steps", "lr_decay_steps")  # written down, but a run may go on with another

Facts = dict[str, Any]


class Work(Schedule, Protocol):
    """What a workload says of the order of its data and of its learning rate."""

    @property
    def seed(self) -> int: ...


def facts_of(model: Model, plan: Plan, work: Work, data: TokenFile | None, pack: bool) -> Facts:
    """What a checkpoint's numbers come from: the model's shape, formats, the data's order, and the learning rate."""
    shape = {f"model.{name}": value for name, value in to_plain(model).items() if name != "name"}
    formats = {"dtype": plan.dtype, "update": plan.update}
    order: Facts = {"seqlen": plan.seqlen, "gbs": plan.gbs, "seed": work.seed, "pack": pack}
    order["data"] = None if data is None else to_plain(data.header)  # a file may move
    return shape | formats | order | {name: getattr(work, name) for name in SCHEDULE}


def resume_point(work: Resumable, folder: Path, facts: Facts) -> Path | None:
    """The checkpoint that a run in this folder goes on from, checked against its facts; none: a new run."""
    identity = {name: value for name, value in facts.items() if name not in SCHEDULE}
    return checkpoint_folder.resume_point(work, folder, identity, FORMAT)


def save(
    folder: Path,
    step: int,
    units: Iterable[tuple[int, dict[str, Tensor]]],
    facts: Facts,
    scales: dict[str, Tensor] | None = None,
) -> None:
    """Write the checkpoint of a step to a run folder; on the disk when this returns, and the older ones until then."""
    final = checkpoint_folder.place_of(folder, step)
    written = 0
    try:
        partial = checkpoint_folder.begin(final)
        for unit, tensors in units:
            written += _write(_file(partial, unit), tensors)
        if scales is not None:
            written += _write(partial / SCALES, scales)
        checkpoint_folder.finish(final, facts, FORMAT)
    except (OSError, SafetensorError) as error:
        checkpoint_folder.give_up(final)
        why = checkpoint_folder.cause(error)
        raise LaunchError(f"cannot write checkpoint {final}: {why} after {written / 1e9:.2f} GB of it") from error


def load(path: Path, unit: int) -> dict[str, Tensor]:
    """The tensors of a unit, as they were given to `save`."""
    return _read(_file(path, unit))


def load_scales(path: Path) -> dict[str, Tensor] | None:
    """What was given to `save`."""
    file = path / SCALES
    return _read(file) if file.exists() else None


def _write(file: Path, tensors: dict[str, Tensor]) -> int:
    """Bytes that are on the disk now."""
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, file)
    checkpoint_folder.sync(file)
    return file.stat().st_size


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume: cannot read checkpoint {file}: {checkpoint_folder.cause(error)}") from error


def _file(checkpoint: Path, unit: int) -> Path:
    return checkpoint / f"unit_{unit:04}.safetensors"
