"""Checkpoint folders on disk, for every engine: atomic commit, retention, and validation of a resume.

    checkpoints/step_10/           complete: renamed to this name last
    checkpoints/step_15.partial/   being written, or left behind by a run that was killed

`checkpoint.json` beside the tensors identifies the run, so that an incompatible resume is refused with the reason.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from llmb.config.serialization import current_names, read_json, to_json
from llmb.config.spec import OutOfCore, Training
from llmb.errors import ConfigError

KEEP_LATEST = 2  # complete checkpoints; the older one is a backup of the newer
FOLDER = "checkpoints"  # of the run folder
IDENTITY = "checkpoint.json"

_COMPLETE = re.compile(r"step_(\d+)")
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # format of libraries written in Rust


def resume_checkpoint(
    workload: Training | OutOfCore, folder: Path, identity: dict[str, Any], format_version: int
) -> Path | None:
    """Return the checkpoint that a run in this folder resumes from, checked against `identity`; None: a new run."""
    checkpoint = None if workload.resume is None else latest_checkpoint(Path(workload.resume))
    if checkpoint is not None:
        saved = current_names("Model", read_json(checkpoint / IDENTITY), prefix="model.")
        if (saved_format := saved.get("format", 1)) != format_version:
            raise ConfigError(
                f"resume: {checkpoint} has format {saved_format}, this version of llmb reads format "
                f"{format_version} only"
            )
        for name, value in identity.items():
            if saved.get(name) != value:
                raise ConfigError(f"resume: {checkpoint} was made with {_difference(name, saved.get(name), value)}")
        if checkpoint_step(checkpoint) >= workload.steps:
            raise ConfigError(f"resume: {checkpoint} is past the last step, {workload.steps}; raise steps to continue")
    existing = complete_checkpoints(folder / FOLDER)
    resumed_step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    if workload.checkpoint_every is not None and existing and checkpoint_step(existing[-1]) > resumed_step:
        raise ConfigError(f"{existing[-1]} already exists; resume={folder} continues from it")
    return checkpoint


def precision_change(checkpoint: Path, precision: dict[str, Any]) -> str | None:
    """Return in one line how the number formats of a run differ from those of the run that wrote a checkpoint.

    None: in nothing, or it does not record them. The run continues, only not bit for bit as the other would have.
    """
    saved = read_json(checkpoint / IDENTITY).get("precision", precision)
    changed = [name for name, value in precision.items() if saved.get(name) != value]
    if not changed:
        return None
    before, now = (", ".join(f"{name}={run.get(name)}" for name in changed) for run in (saved, precision))
    return f"resume: {checkpoint} was made with {before}, this run has {now}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _COMPLETE.fullmatch(path.name)), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the step after which a complete checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def latest_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint of a run folder or of its checkpoints folder."""
    if not folder.is_dir():
        raise ConfigError(f"resume: there is no folder {folder}")
    checkpoints = complete_checkpoints(folder / FOLDER) or complete_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(f"resume: {folder} holds no complete checkpoint (checkpoints/step_<number>)")
    return checkpoints[-1]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of a step."""
    return folder / FOLDER / f"step_{step}"


def partial_path(final: Path) -> Path:
    """Return the path of a checkpoint while it is being written."""
    return final.with_name(f"{final.name}.partial")


def create_partial(final: Path) -> Path:
    """Create the empty folder to write a checkpoint to."""
    partial = partial_path(final)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run in this folder
    partial.mkdir(parents=True, exist_ok=True)  # another rank may create it first
    return partial


def commit(final: Path, identity: dict[str, Any], format_version: int) -> None:
    """Write the identity, rename the folder to its final name and delete old checkpoints; all tensors are on disk."""
    partial = partial_path(final)
    _write_durably(partial / IDENTITY, to_json({"format": format_version, "step": checkpoint_step(final)} | identity))
    fsync(partial)
    partial.rename(final)
    fsync(final.parent)
    for old in complete_checkpoints(final.parent)[:-KEEP_LATEST]:
        # Renamed first: a half-deleted folder must not look complete.
        shutil.rmtree(old.rename(partial_path(old)))


def discard_partial(final: Path) -> None:
    """Delete a partial checkpoint: a full disk then has space for the end of the log."""
    shutil.rmtree(partial_path(final), ignore_errors=True)


def root_cause(error: BaseException) -> str:
    """Return in one line why a read or write failed: the operating system's message where there is one."""
    inner: BaseException | None = error
    while inner is not None:  # libraries wrap the error of the operating system
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__context__
    if match := _SYSTEM_ERROR.search(str(error)):
        return os.strerror(int(match[1]))
    return " ".join(str(error).split())[:200] or type(error).__name__


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _difference(name: str, saved: Any, current: Any) -> str:
    """Describe the first field in which two values differ."""
    if isinstance(saved, dict) and isinstance(current, dict):
        inner = next(field for field in {**current, **saved} if saved.get(field) != current.get(field))
        return _difference(f"{name}.{inner}", saved.get(inner), current.get(inner))
    return f"{name}={saved}, this run has {current}"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
