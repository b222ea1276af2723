"""Folder of a sweep: one class owns every path in it.

    $LLMB_INSTALL/sweeps/<name>_<timestamp>/
      sweep.json                                  plan, written before anything is measured
      points.jsonl                                one line per finished point, flushed as it finishes
      points/<point>/events.rank0.jsonl           requests of each point: every figure can be derived again
      result.json sweep.csv sweep.svg             rewritten after every point
      report.html                                 written at the end
      server.log                                  of a server that the sweep started

A point without its line in points.jsonl was not finished: its folder is set aside and it is measured again.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.config.serialization import MAX_JSON_BYTES, build, parse_json, read_json, to_json, write_atomic
from llmb.errors import ConfigError, LaunchError
from llmb.loadgen.sweep.sweep_plan import SweepPlan

PLAN_FILE = "sweep.json"


def sweeps_path(install: Path) -> Path:
    """Return the folder that holds all sweeps of an installation."""
    return install / "sweeps"


@dataclass(frozen=True)
class SweepFolder:
    """Folder of one sweep, with the path of each of its files."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str, plan: Any, now: datetime) -> "SweepFolder":
        """Create a new folder in `parent` and write the plan; an existing folder is never reused."""
        for attempt in range(100):
            suffix = f"-{attempt}" if attempt else ""
            folder = cls(parent / f"{name}_{now:%Y%m%d-%H%M%S}{suffix}")
            try:
                folder.path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot write to {folder.path}: {error.strerror}") from error
            write_atomic(folder.plan, to_json(plan, indent=2) + "\n")
            return folder
        raise LaunchError(f"cannot name a new folder in {parent}")

    @classmethod
    def open(cls, parent: Path, name: str) -> "SweepFolder":
        """Open a sweep by the path or the name of its folder, or raise with the newest names."""
        for path in (Path(name), parent / name):
            if (path / PLAN_FILE).is_file():
                return cls(path.absolute())
        newest = sorted(parent.glob(f"*/{PLAN_FILE}"), key=lambda path: path.stat().st_mtime)[-3:]
        names = ", ".join(path.parent.name for path in reversed(newest)) or "none yet"
        raise ConfigError(f"no sweep {name!r}; the newest are: {names}")

    @property
    def plan(self) -> Path:
        return self.path / PLAN_FILE

    @property
    def points(self) -> Path:
        return self.path / "points.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def csv(self) -> Path:
        return self.path / "sweep.csv"

    @property
    def svg(self) -> Path:
        return self.path / "sweep.svg"

    @property
    def report_page(self) -> Path:
        return self.path / "report.html"

    @property
    def server_log(self) -> Path:
        return self.path / "server.log"

    def point_folder(self, name: str) -> Path:
        """Return a new, empty folder for a point; what an unfinished attempt left is set aside."""
        folder = self.path / "points" / name
        attempt = 1
        while folder.exists():
            aside = folder.with_name(f"{name}.unfinished{attempt}")
            if not aside.exists():
                folder.rename(aside)
            attempt += 1
        folder.mkdir(parents=True)
        return folder

    def append_point(self, point: Any) -> None:
        """Append a finished point with one write that reaches the disk; a line cut short is removed."""
        data = (to_json(point) + "\n").encode()
        descriptor = os.open(self.points, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise LaunchError(f"cannot write to {self.points}: {os.strerror(errno.ENOSPC)}")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_points(self) -> list[dict[str, Any]]:
        """Return the finished points; a last line that a kill cut short is cut off, as it never finished."""
        if not self.points.exists():
            return []
        if (size := self.points.stat().st_size) > MAX_JSON_BYTES:
            raise ConfigError(f"cannot read {self.points}: {size:,} bytes are more than the {MAX_JSON_BYTES:,} allowed")
        data = self.points.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.points, len(whole))
        try:
            return [parse_json(line.decode()) for line in whole.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(
                f"{self.points}: a line is no JSON ({error}); remove it to measure its point again"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process from continuing the same sweep; the lock ends with the process."""
        descriptor = os.open(self.path / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"sweep {self.path.name} is running in another process") from error
            yield


def read_plan(folder: SweepFolder) -> SweepPlan:
    """Read the plan of a sweep that is continued; a ConfigError names what its points cannot be measured without."""
    plan = build(SweepPlan, read_json(folder.plan), str(folder.plan))
    needed = {"url": ("load",), "serve": ("load", "arguments"), "in_process": ("run",)}[plan.mode]
    for variant in plan.variants[:1] if plan.mode == "url" else plan.variants:
        missing = [name for name in needed if not plan.configs.get(variant, {}).get(name)]
        if missing:
            raise ConfigError(f"{folder.plan}: configs of {variant!r}: {missing[0]} is missing")
    if not plan.ladder or not plan.variants or plan.repeats < 1:
        raise ConfigError(f"{folder.plan}: it needs a ladder, a variant and a repeat")
    return plan
