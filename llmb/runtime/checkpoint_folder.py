"""Checkpoint folders on disk, for every engine: atomic commit, retention, and validation of a resume.

    checkpoints/step_10/           complete: renamed to this name last
    checkpoints/step_15.partial/   being written, or left behind by a run that was killed

`checkpoint.json` beside the tensors identifies the run, so that an incompatible resume is refused with the reason, and
has the checksums of all files (`checksums/`).
"""

import json
import os
import re
import shutil
import sys
import time
import zlib
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llmb.config.model import Model
from llmb.config.serialization import current_names, read_json, to_json, write_atomic
from llmb.config.spec import OutOfCore, Training
from llmb.errors import ConfigError
from llmb.events import RunResumed
from llmb.formats.checkpoint_steps import FOLDER, checkpoint_step, complete_checkpoints, is_complete
from llmb.runtime.recorder import EventRecorder

KEEP_LATEST = 2  # complete checkpoints; the older one is a backup of the newer
IDENTITY = "checkpoint.json"

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # format of libraries written in Rust


FileChecksums = dict[str, dict[str, int]]  # size and checksum by file name


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run continues, and how the run differs from the one that wrote it."""

    path: Path
    differences: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return checkpoint_step(self.path)


def resume_point(
    workload: Training | OutOfCore,
    folder: Path,
    required: dict[str, Any],
    expected: dict[str, Any],
    format_version: int,
) -> ResumePoint | None:
    """Return where a run in this folder resumes; None: a new run.

    What is `required` must be as in the checkpoint. What is `expected` and recorded there (data, its order, schedule,
    number formats) decides whether the run computes what the other would have: differences need `force_resume`.
    """
    point = None
    required, expected = _as_json(required), _as_json(expected)
    if workload.resume is not None:
        path = latest_checkpoint(Path(workload.resume))
        saved = _with_model_defaults(current_names("Model", _identity_or_offer(path), prefix="model."))
        if (saved_format := saved.get("format", 1)) != format_version:
            raise ConfigError(
                f"resume: {path} has format {saved_format}, this version of llmb reads format {format_version} only"
            )
        for name, value in required.items():
            if saved.get(name) != value:
                raise ConfigError(f"resume: {path} was made with {_difference(name, saved.get(name), value)}")
        differences = [
            _difference(name, saved[name], value)
            for name, value in expected.items()
            if name in saved and saved[name] != value
        ]
        if differences and not workload.force_resume:
            raise ConfigError(f"resume: {path} was made with {'; '.join(differences)}; --force continues all the same")
        if checkpoint_step(path) >= workload.steps:
            raise ConfigError(f"resume: {path} is past the last step, {workload.steps}; raise steps to continue")
        point = ResumePoint(path, tuple(differences))
    existing = complete_checkpoints(folder / FOLDER)
    resumed_step = 0 if point is None else point.step
    if workload.checkpoint_every is not None and existing and checkpoint_step(existing[-1]) > resumed_step:
        raise ConfigError(f"{existing[-1]} already exists; resume={folder} continues from it")
    return point


def record_resume(recorder: EventRecorder, point: ResumePoint | None) -> None:
    """Record where a run continues and print how it differs, on the first rank."""
    if point is None or recorder.rank:
        return
    for difference in point.differences:
        print(f"warning: resume: {point.path} was made with {difference}", file=sys.stderr, flush=True)
    checkpoint, differences = str(point.path), point.differences
    recorder.add(RunResumed(time=time.time(), step=point.step, checkpoint=checkpoint, differences=differences))


def _identity_or_offer(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`; the error of a damaged one offers an older checkpoint."""
    try:
        return read_identity(checkpoint)
    except ConfigError as error:
        from llmb.runtime.checksums.checkpoint_checksums import older_offer  # which imports this module

        raise ConfigError(f"{error}; {older_offer(checkpoint)}") from error


def read_identity(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`; raise ConfigError if it is damaged."""
    content = read_json(checkpoint / IDENTITY)
    if not isinstance(content, dict):
        raise ConfigError(f"resume: {checkpoint / IDENTITY} is damaged: it is not a JSON object")
    crc32 = content.pop("crc32", None)
    if crc32 is not None and crc32 != _crc32(content):
        raise ConfigError(f"resume: {checkpoint / IDENTITY} is damaged: its checksum differs")
    return content


def latest_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint of a run folder or of its checkpoints folder, or this very checkpoint."""
    if not folder.is_dir():
        raise ConfigError(f"resume: there is no folder {folder}")
    if is_complete(folder) and (folder / IDENTITY).is_file():
        return folder
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
    if partial.is_symlink():  # never written through
        partial.unlink()
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run in this folder
    partial.mkdir(parents=True, exist_ok=True)  # another rank may create it first
    return partial


def commit(final: Path, identity: dict[str, Any], format_version: int, files: FileChecksums) -> None:
    """Write the identity, rename the folder to its final name and delete old checkpoints; all tensors are on disk."""
    partial = partial_path(final)
    content = {"format": format_version, "step": checkpoint_step(final)} | identity | {"files": files}
    content = _as_json(content)
    write_atomic(partial / IDENTITY, to_json(content | {"crc32": _crc32(content)}), durable=True)
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


def _with_model_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """Add the fields of a model that did not exist when a checkpoint was written."""
    model = {name.removeprefix("model."): value for name, value in saved.items() if name.startswith("model.")}
    return saved | {f"model.{name}": value for name, value in _with_defaults(Model, model).items()}


def _with_defaults(kind: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of a dataclass, and of dataclasses inside, to what is saved of it; as JSON has them."""
    values = {f.name: _as_json(f.default) for f in fields(kind) if f.default is not MISSING} | saved
    for name, hint in get_type_hints(kind).items():
        inner = next((part for part in get_args(hint) or (hint,) if is_dataclass(part)), None)
        if inner is not None and isinstance(values.get(name), dict):
            values[name] = _with_defaults(inner, values[name])
    return values


def _as_json(value: Any) -> Any:
    """Return the value as it is read back: a tuple is a list."""
    return json.loads(to_json(value))


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _difference(name: str, saved: Any, current: Any) -> str:
    """Describe the first field in which two values differ."""
    if isinstance(saved, dict) and isinstance(current, dict):
        inner = next(key for key in {**current, **saved} if saved.get(key) != current.get(key))
        return _difference(f"{name}.{inner}", saved.get(inner), current.get(inner))
    return f"{name}={saved}, this run has {current}"
