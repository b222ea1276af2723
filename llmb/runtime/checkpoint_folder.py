"""Checkpoints on disk, whatever engine writes them: folders that are complete or not there, and where a run goes on.

    checkpoints/step_10/           complete: the rename to this name comes last
    checkpoints/step_15.partial/   being written, or left behind by a run that was killed

`checkpoint.json` beside the tensors says what they belong to, so that a wrong resume is refused in plain words.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from llmb.config.serialization import read_json, to_json
from llmb.errors import ConfigError

KEPT = 2  # complete checkpoints; the older one is there in case the disk loses the newer
FOLDER = "checkpoints"  # of the run folder
IDENTITY = "checkpoint.json"

_COMPLETE = re.compile(r"step_(\d+)")
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # as libraries written in Rust say it


class Resumable(Protocol):
    """What a workload says of its checkpoints; see the fields of spec.Training."""

    @property
    def steps(self) -> int: ...
    @property
    def checkpoint_every(self) -> int | None: ...
    @property
    def resume(self) -> str | None: ...


def resume_point(work: Resumable, folder: Path, identity: dict[str, Any], form: int) -> Path | None:
    """The checkpoint that a run in this folder goes on from, checked against what it is; none: a new run."""
    chosen = None if work.resume is None else newest(Path(work.resume))
    if chosen is not None:
        saved = read_json(chosen / IDENTITY)
        if (was := saved.get("format", 1)) != form:
            raise ConfigError(f"resume: {chosen} has format {was}, this version of llmb reads format {form} only")
        for name, mine in identity.items():
            if saved.get(name) != mine:
                raise ConfigError(f"resume: {chosen} was made with {_difference(name, saved.get(name), mine)}")
        if number(chosen) >= work.steps:
            raise ConfigError(f"resume: {chosen} is past the last step, {work.steps}; raise steps to go on")
    here = complete(folder / FOLDER)
    if work.checkpoint_every is not None and here and (chosen is None or number(here[-1]) > number(chosen)):
        raise ConfigError(f"{here[-1]} is there already; resume={folder} goes on from it")
    return chosen


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _COMPLETE.fullmatch(path.name)), key=number)


def number(path: Path) -> int:
    """The step after which a complete checkpoint was made."""
    return int(path.name.removeprefix("step_"))


def newest(folder: Path) -> Path:
    """The newest complete checkpoint of a run folder or of its checkpoints folder."""
    if not folder.is_dir():
        raise ConfigError(f"resume: there is no folder {folder}")
    found = complete(folder / FOLDER) or complete(folder)
    if not found:
        raise ConfigError(f"resume: {folder} holds no complete checkpoint (checkpoints/step_<number>)")
    return found[-1]


def place_of(folder: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is once it is complete."""
    return folder / FOLDER / f"step_{step}"


def partial_of(final: Path) -> Path:
    """Where a checkpoint is until it is complete."""
    return final.with_name(f"{final.name}.partial")


def begin(final: Path) -> Path:
    """The folder to write a checkpoint to, made and empty."""
    partial = partial_of(final)
    shutil.rmtree(partial, ignore_errors=True)  # of a run in this folder that was killed
    partial.mkdir(parents=True, exist_ok=True)  # another rank may be first
    return partial


def finish(final: Path, identity: dict[str, Any], form: int) -> None:
    """All tensors are written: say whose they are, give the folder its name, and drop the oldest beyond those kept."""
    partial = partial_of(final)
    _write_durably(partial / IDENTITY, to_json({"format": form, "step": number(final)} | identity))
    sync(partial)
    partial.rename(final)
    sync(final.parent)
    for old in complete(final.parent)[:-KEPT]:
        # By a rename too: half deleted, it must not look complete.
        shutil.rmtree(old.rename(partial_of(old)))


def give_up(final: Path) -> None:
    """Room for the end of the log, if the disk is full."""
    shutil.rmtree(partial_of(final), ignore_errors=True)


def cause(error: BaseException) -> str:
    """Why something could not be read or written, in one line: the system's own words where it gave any."""
    inner: BaseException | None = error
    while inner is not None:  # libraries' own errors cover the system's
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__context__
    if found := _SYSTEM_ERROR.search(str(error)):
        return os.strerror(int(found[1]))
    return " ".join(str(error).split())[:200] or type(error).__name__


def sync(path: Path) -> None:
    """What a file holds, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _difference(name: str, was: Any, now: Any) -> str:
    """The first field in which two values differ, and how."""
    if isinstance(was, dict) and isinstance(now, dict):
        inner = next(field for field in {**now, **was} if was.get(field) != now.get(field))
        return _difference(f"{name}.{inner}", was.get(inner), now.get(inner))
    return f"{name}={was}, this run has {now}"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
