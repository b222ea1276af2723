"""The run folder. One class owns every path in it; nobody else joins paths.

    $LLMB_INSTALL/                                     default ~/.llmb, no set-up needed
      .llmb/jobs.sqlite3
      workloads/<target>/experiments/<name>/
        .lock
        <name>_<timestamp>/<name>/
          config.json job.sh pid events.rank0.jsonl log-<name>.out result.json llmb-config_<jobid>.yaml profile/
          (of serving runs the log is <name>_streaming-<on/off>_<jobid>.out)
          submission.json slurm-<jobid>.out allocation.json restart-<n>/         of Slurm jobs

A run folder is made once; nothing here reuses or deletes one. Slurm may start a job again under its old id, while
ranks of the first start still live on a node it lost: so each start but the first works in restart-<n>/, with pid,
events, log and result of its own, and the newest start is what counts.
"""

import errno
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shutil import copyfile
from typing import Any

from llmb.config.serialization import build, read_json, to_json, write_whole
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LaunchError, LlmbError
from llmb.launch.procfs import find
from llmb.launch.secrets import mask

CONFIG_FILE = "config.json"
TIMESTAMP = "%Y%m%d-%H%M%S"
RESTART = "restart-"
LONGEST_NAME = 200  # bytes; file systems allow 255, and a time stamp or a suffix is added to the name


def store_path(install: Path) -> Path:
    """The job store."""
    return install / ".llmb" / "jobs.sqlite3"


def experiment_path(install: Path, config: RunConfig) -> Path:
    """The folder that holds all runs of the same experiment."""
    for field in ("target", "name"):
        text = getattr(config, field)
        if not text or text in (".", "..") or "/" in text or not text.isprintable():
            raise ConfigError(f"{field} {text!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
        if len(os.fsencode(text)) > LONGEST_NAME:
            raise ConfigError(f"{field} {text[:40]!r}... is too long for a folder: more than {LONGEST_NAME} bytes")
    return install / "workloads" / config.target / "experiments" / config.name


def lock_path(experiment: Path) -> Path:
    """What a local run of this experiment holds while it runs."""
    return experiment / ".lock"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, or say in one line what to do about it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(folder, error) from error


def refusal(path: Path, error: OSError) -> LlmbError:
    """The error for a path that cannot be written: the system's fault when the disk is full, else a wrong folder."""
    text = f"cannot write to {shown(path)}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return LaunchError(f"{text}; make room, or choose another folder: LLMB_INSTALL=/folder")
    return ConfigError(f"{text}; choose a folder you can write to: LLMB_INSTALL=/folder")


def shown(path: Path) -> str:
    """A path for a message: quoted when a line break or the like in it would spoil the line."""
    text = str(path)
    return text if text.isprintable() else repr(text)


@dataclass(frozen=True)
class RunDir:
    """One run's folder: where each of its files is."""

    path: Path
    restart: int = 0  # how often the job was started again

    @classmethod
    def create(cls, install: Path, config: RunConfig, now: datetime) -> "RunDir":
        """Make a new folder for this run and write its config.json, secrets masked."""
        experiment = experiment_path(install, config)
        make_folder(experiment)
        rundir = cls(_take(experiment, f"{config.name}_{now.astimezone():{TIMESTAMP}}") / config.name)
        make_folder(rundir.path)
        write_whole(rundir.config, to_json(replace(config, environment=mask(config.environment)), indent=2) + "\n")
        return rundir

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """The run folder at `path`."""
        rundir = cls(path.absolute())
        if not rundir.config.is_file():
            raise ConfigError(f"{shown(path)} is not a run folder: it holds no {CONFIG_FILE}")
        return rundir._newest()

    @classmethod
    def find_all(cls, install: Path) -> Iterator["RunDir"]:
        """Every run folder of an installation, by target, name and time."""
        for experiment in sorted((install / "workloads").glob("*/experiments/*")):
            yield from cls.of_experiment(experiment)

    @classmethod
    def of_experiment(cls, experiment: Path) -> Iterator["RunDir"]:
        """Every run folder of one experiment, by time."""
        for config in sorted(experiment.glob(f"*/*/{CONFIG_FILE}")):
            yield cls(config.parent)._newest()

    def _newest(self) -> "RunDir":
        """The same folder as its newest start left it."""
        numbers = (path.name.removeprefix(RESTART) for path in self.path.glob(f"{RESTART}*"))
        return replace(self, restart=max((int(number) for number in numbers if number.isdigit()), default=0))

    def for_new_start(self) -> "RunDir":
        """Where a start of the job works: here, or, where it was started before, in a folder of its own."""
        if not self.allocation.exists():
            return self
        again = replace(self, restart=self.restart + 1)
        try:
            again.work.mkdir()
            copyfile(self.config, again.work / CONFIG_FILE)
        except OSError as error:
            raise refusal(again.work, error) from error
        return again

    def read_config(self) -> RunConfig:
        """The configuration the run was made with."""
        return build(RunConfig, read_json(self.config), where=CONFIG_FILE)

    def write_job_script(self, text: str) -> None:
        """Store job.sh, ready to be run by hand."""
        write_whole(self.job_script, text)
        self.job_script.chmod(0o755)

    def write_record(self, config: RunConfig, job_id: str, launcher: str = "local", **cluster: str | None) -> None:
        """Store llmb-config_<jobid>.yaml; `cluster` may give cluster_name and the slurm_* keys."""
        from llmb.launch.job_record import (  # only here: slow, and nothing else on the way to a run needs it
            as_yaml,
            record,
        )

        launched = datetime.fromtimestamp(self.created_at)
        install = self.install
        data = record(config, job_id=job_id, launcher=launcher, launched=launched, install=install, cluster=cluster)
        write_whole(self.record(job_id), as_yaml(data))

    def add_to_log(self, text: str) -> None:
        """End the log with what was found out when the engine was gone."""
        try:
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"\n{text}\n")
        except OSError as error:
            raise refusal(self.log, error) from error

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def created_at(self) -> float:
        """Seconds since 1970, by the folder's time stamp; by the age of config.json where someone renamed it."""
        stamp = self.path.parent.name[len(self.name) + 1 :][:15]
        try:
            return datetime.strptime(stamp, TIMESTAMP).timestamp()
        except ValueError:
            return self.config.stat().st_mtime

    @property
    def job_id(self) -> str | None:
        """The id this run's record is filed under."""
        records = sorted(self.path.glob("llmb-config_*.yaml"))
        return records[0].stem.removeprefix("llmb-config_") if records else None

    @property
    def install(self) -> Path:
        """The installation that the folder belongs to."""
        return self.path.parents[5]

    @property
    def work(self) -> Path:
        """The folder that the engine works in."""
        return self.path / f"{RESTART}{self.restart}" if self.restart else self.path

    @property
    def config(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def log(self) -> Path:
        """All that was printed. Serving runs have the name that readers of NVIDIA's inference recipes look for."""
        streaming = self._streaming()
        if streaming is None:
            return self.work / f"log-{self.name}.out"
        job = f"_{self.job_id}" if self.job_id else ""
        return self.work / f"{self.name}_streaming-{'on' if streaming else 'off'}{job}.out"

    def _streaming(self) -> bool | None:
        """Whether a serving run streams; none: it is another kind of run, or its configuration cannot be read."""
        try:
            return read_json(self.config)["workload"].get("streaming")
        except (ConfigError, KeyError, TypeError, AttributeError):
            return None

    @property
    def result(self) -> Path:
        return self.work / "result.json"

    @property
    def submission(self) -> Path:
        """How a Slurm job came to be; written before Slurm knows of it."""
        return self.path / "submission.json"

    @property
    def allocation(self) -> Path:
        """The nodes that a start of a Slurm job was given: the first that it writes."""
        return self.work / "allocation.json"

    @property
    def ending(self) -> Path:
        """What Slurm said of a job that has ended; Slurm itself forgets."""
        return self.path / "ending.json"

    def slurm_output(self, job_id: str) -> Path:
        """What the job printed outside of the run's own log."""
        return self.path / f"slurm-{job_id}.out"

    @property
    def origin(self) -> Path:
        """Where an imported run comes from; runs made here have none."""
        return self.path / "origin.json"

    @property
    def pid_file(self) -> Path:
        return self.work / "pid"

    @property
    def profile(self) -> Path:
        return self.work / "profile"

    @property
    def lanes(self) -> Path:
        """What an out-of-core run did on its lanes, when it was profiled."""
        return self.profile / "lanes.json"

    @property
    def profile_page(self) -> Path:
        return self.profile / "profile.html"

    def events(self, rank: int) -> Path:
        return self.work / f"events.rank{rank}.jsonl"

    def all_events(self) -> list[Path]:
        """The event files there are, one a rank."""
        return sorted(self.work.glob("events.rank*.jsonl"))

    def record(self, job_id: str) -> Path:
        return self.path / f"llmb-config_{job_id}.yaml"


def mark_alive(rundir: RunDir, pid: int) -> None:
    """Note the process that lives as long as the run does, with its start time, as pids are used again."""
    process = find(pid)
    marker = {"pid": pid, "started": process.started if process else None, "host": socket.gethostname()}
    write_whole(rundir.pid_file, json.dumps(marker) + "\n")


def is_alive(rundir: RunDir) -> bool | None:
    """Whether the run goes on; None when it was started on another host, which cannot be seen from here."""
    marker = _marker(rundir)
    if marker is None:
        return False
    if marker["host"] != socket.gethostname():
        return None
    process = find(marker["pid"])
    return process is not None and process.started == marker["started"]


def live_pid(rundir: RunDir) -> int | None:
    """The process to signal so that a run that goes on here ends; None when there is none."""
    marker = _marker(rundir)
    return marker["pid"] if marker and is_alive(rundir) else None


def _marker(rundir: RunDir) -> dict[str, Any] | None:
    try:
        marker = read_json(rundir.pid_file)
    except ConfigError:  # not started yet
        return None
    return marker if isinstance(marker, dict) and marker.keys() >= {"pid", "started", "host"} else None


def _take(experiment: Path, stamp: str) -> Path:
    """The first folder of this time stamp that nobody else has; making it is what claims it."""
    number = 1
    while True:
        folder = experiment / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # of hundreds made in one second, those there are need not be tried one by one
            number = max(number, sum(name.startswith(stamp) for name in os.listdir(experiment))) + 1
        except OSError as error:
            raise refusal(folder, error) from error
