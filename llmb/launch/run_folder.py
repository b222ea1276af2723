"""Run folder: one class owns every path in it; nobody else joins paths.

    $LLMB_INSTALL/                                     default ~/.llmb
      .llmb/jobs.sqlite3
      workloads/<target>/experiments/<name>/
        .lock
        <name>_<timestamp>/<name>/
          config.json job.sh pid events.rank0.jsonl log-<name>.out result.json report.html
          command.txt llmb-config_<jobid>.yaml profile/
          (the log of serving runs is <name>_streaming-<on/off>_<jobid>.out)
          submission.json slurm-<jobid>.out allocation.json restart-<n>/         of Slurm jobs
      runs/<jobid>-llama3.1-8b-bf16                    short path: a link to the folder above

The long path is the one of NVIDIA's recipe documents. The short one is a link to it, because the id of a Slurm job is
only known once its folder exists.

A run folder is created once; nothing here reuses or deletes one. Slurm may requeue a job under its old id while ranks
of the first start are still alive on a node it lost: so each start but the first works in restart-<n>/, with its own
pid, events, log and result, and the newest start counts. A run that restarts by itself does the same (`restarts/`).
"""

import errno
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shutil import copyfile

from llmb.config.load_settings import config_from_json
from llmb.config.overrides import SELECTOR_VARIABLES, VARIABLES
from llmb.config.serialization import read_json, to_json, write_atomic
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LaunchError, LlmbError
from llmb.formats.checkpoint_steps import FOLDER as CHECKPOINTS
from llmb.formats.folder_access import write_hint
from llmb.launch.engine_log import open_log
from llmb.launch.run_files.short_path import find_short_path, link_short_path
from llmb.launch.secrets import mask, mask_random_argument, scrub_thoroughly

CONFIG_FILE = "config.json"
EVENTS_FILE = "events.rank{}.jsonl"
RESULT_FILE = "result.json"
TIMESTAMP = "%Y%m%d-%H%M%S"
RESTART_PREFIX = "restart-"
NUMBER = re.compile(r"[0-9]{1,9}")  # of a rank or a start: int() takes "\N{SUPERSCRIPT TWO}" for none, isdigit() does
MAX_NAME_BYTES = 200  # file systems allow 255, and a time stamp or a suffix is added to the name


def store_path(install: Path) -> Path:
    """Return the path of the job store."""
    return install / ".llmb" / "jobs.sqlite3"


def workload_path(install: Path, workload: str) -> Path:
    """Return the folder of a workload, $LLMB_WORKLOAD of the recipe documents."""
    return install / "workloads" / workload


def experiment_path(install: Path, config: RunConfig) -> Path:
    """Return the folder that holds all runs of the same experiment."""
    for field in ("target", "name"):
        text = getattr(config, field)
        if not text or text in (".", "..") or "/" in text or not text.isprintable():
            raise ConfigError(f"{field} {text!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
        if len(os.fsencode(text)) > MAX_NAME_BYTES:
            raise ConfigError(f"{field} {text[:40]!r}... is too long for a folder: more than {MAX_NAME_BYTES} bytes")
    return workload_path(install, config.target) / "experiments" / config.name


def lock_path(experiment: Path) -> Path:
    """Return the file that a local run of this experiment locks while it runs."""
    return experiment / ".lock"


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, or raise an error that says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error


def write_error(path: Path, error: OSError) -> LlmbError:
    """Return the error for a path that cannot be written: a LaunchError if the disk is full, else a ConfigError."""
    text = f"cannot write to {printable_path(path)}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return LaunchError(f"{text}; free some space, or choose another folder: LLMB_INSTALL=/folder")
    return ConfigError(f"{text}; {write_hint(path)}")


def printable_path(path: Path) -> str:
    """Format a path for a message: quoted if it holds a line break or the like."""
    text = str(path)
    return text if text.isprintable() else repr(text)


@dataclass(frozen=True)
class RunFolder:
    """Folder of one run, with the path of each of its files."""

    path: Path
    restart: int = 0  # how often the job was requeued

    @classmethod
    def create(cls, install: Path, config: RunConfig, now: datetime) -> "RunFolder":
        """Create a new folder for this run and write its config.json, secrets masked."""
        experiment = experiment_path(install, config)
        make_folder(experiment)
        run_folder = cls(_claim_folder(experiment, f"{config.name}_{now.astimezone():{TIMESTAMP}}") / config.name)
        make_folder(run_folder.path)
        write_atomic(run_folder.config, to_json(replace(config, environment=mask(config.environment)), indent=2) + "\n")
        return run_folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the run folder at `path`, long or short."""
        path = path.absolute()
        run_folder = cls(Path(os.path.normpath(path.parent / os.readlink(path))) if path.is_symlink() else path)
        if not is_run_folder(run_folder.path):
            raise ConfigError(f"{printable_path(path)} is not a run folder: it holds no {CONFIG_FILE}")
        return run_folder._newest_start()

    @classmethod
    def of_log(cls, log: Path) -> "RunFolder | None":
        """Return the run folder, at its newest start, that a log lies in; None: it lies in no run folder."""
        folder = log.absolute().parent
        folder = folder.parent if folder.name.startswith(RESTART_PREFIX) else folder
        return cls.open(folder) if (folder / CONFIG_FILE).is_file() else None

    @classmethod
    def find_all(cls, install: Path) -> Iterator["RunFolder"]:
        """Yield every run folder of an installation, by target, name and time."""
        for experiment in sorted(workload_path(install, "").glob("*/experiments/*")):
            if not experiment.parents[1].is_symlink():  # another name of the same workload
                yield from cls.of_experiment(experiment)

    @classmethod
    def of_experiment(cls, experiment: Path) -> Iterator["RunFolder"]:
        """Yield every run folder of one experiment, by time."""
        for folder in sorted(experiment.glob("*/*")):
            # A link to nothing counts, and so does what a run left behind: the run is damaged, not absent.
            if any(os.path.lexists(folder / name) for name in (CONFIG_FILE, EVENTS_FILE.format(0), RESULT_FILE)):
                yield cls(folder)._newest_start()

    def _newest_start(self) -> "RunFolder":
        """Return the same folder at its newest start."""
        numbers = (name.removeprefix(RESTART_PREFIX) for name in self._names() if name.startswith(RESTART_PREFIX))
        return replace(self, restart=max((int(number) for number in numbers if NUMBER.fullmatch(number)), default=0))

    def for_new_start(self) -> "RunFolder":
        """Return the folder for a start of the job: this one, or for a requeued job a new restart-<n>/."""
        if not self.allocation.exists():
            return self
        restarted = replace(self, restart=self.restart + 1)
        try:
            restarted.work.mkdir()
            copyfile(self.config, restarted.work / CONFIG_FILE)
        except OSError as error:
            raise write_error(restarted.work, error) from error
        return restarted

    def create_restart(self) -> "RunFolder":
        """Create the folder of the next start of a run whose processes have all ended.

        It shares the checkpoints of the first, so that old ones are deleted as in an undisturbed run.
        """
        restarted = replace(self, restart=self.restart + 1)
        try:
            restarted.work.mkdir()
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            (restarted.work / CHECKPOINTS).symlink_to(Path("..", CHECKPOINTS))
        except OSError as error:
            raise write_error(restarted.work, error) from error
        return restarted

    @property
    def starts(self) -> list["RunFolder"]:
        """This folder at each of its starts, up to this one."""
        return [replace(self, restart=number) for number in range(self.restart + 1)]

    @property
    def checkpoints(self) -> Path:
        return self.work / CHECKPOINTS

    @property
    def start_config(self) -> Path:
        """Configuration of this start: where it continues, and what is left to do."""
        return self.work / CONFIG_FILE

    def add_short_path(self, job_id: str) -> Path:
        """Link the short path of this job id to the folder and return it."""
        return link_short_path(self.install, job_id, self.path, self.config)

    @property
    def short_path(self) -> Path:
        """Short path of the folder; the long one where it has none."""
        if self.job_id is None or len(self.path.parents) < 6:  # no job, or no folder of an installation
            return self.path
        return find_short_path(self.install, self.job_id, self.path) or self.path

    def short_path_of(self, path: Path) -> Path:
        """Return a path in this folder as messages show it."""
        return self.short_path / path.relative_to(self.path)

    def read_config(self) -> RunConfig:
        """Read the configuration of the run."""
        return config_from_json(read_json(self.config), where=CONFIG_FILE)

    def write_job_script(self, text: str, *, private: bool = False) -> None:
        """Write job.sh, executable. `private`: for its owner alone, as variables of the user may hold anything."""
        write_atomic(self.job_script, text, 0o600)
        self.job_script.chmod(0o700 if private else 0o755)

    def write_record(self, config: RunConfig, job_id: str, launcher: str = "local", **cluster: str | None) -> None:
        """Write llmb-config_<jobid>.yaml; `cluster` may give cluster_name and the slurm_* keys."""
        from llmb.launch.run_files.job_record import (  # imported here: slow, and not needed to start a run
            build_job_record,
            job_record_yaml,
        )

        launched = datetime.fromtimestamp(self.created_at)
        install = self.install
        data = build_job_record(
            config, job_id=job_id, launcher=launcher, launched=launched, install=install, cluster=cluster
        )
        write_atomic(self.record(job_id), job_record_yaml(data))

    def write_command_line(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Write the command that started the run, after the variables that set its row; secrets masked."""
        names = (*SELECTOR_VARIABLES, *VARIABLES)
        variables = [f"{name}={shlex.quote(environ[name])}" for name in names if environ.get(name)]
        command = shlex.join([Path(arguments[0]).name, *map(mask_random_argument, arguments[1:])])
        write_atomic(self.command_line, scrub_thoroughly(" ".join([*variables, command])) + "\n")

    def add_to_log(self, text: str) -> None:
        """Append text to the log after the engine has exited."""
        try:
            with open(open_log(self.log), "a", encoding="utf-8") as log:
                log.write(f"\n{text}\n")
        except OSError as error:
            raise write_error(self.log, error) from error

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def created_at(self) -> float:
        """Seconds since 1970, by the folder's time stamp; by mtime of config.json where it was renamed."""
        stamp = self.path.parent.name[len(self.name) + 1 :][:15]
        try:
            return datetime.strptime(stamp, TIMESTAMP).timestamp()
        except ValueError:
            return self.config.stat().st_mtime

    @property
    def job_id(self) -> str | None:
        """Id in the name of this run's record."""
        begin, end = "llmb-config_", ".yaml"
        records = [name for name in self._names() if name.startswith(begin) and name.endswith(end)]
        return min(records).removeprefix(begin).removesuffix(end) if records else None

    def _names(self) -> list[str]:
        """Return the names in this folder; none where it cannot be read. Path.glob takes five times as long."""
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    @property
    def install(self) -> Path:
        """Installation that the folder belongs to."""
        return self.path.parents[5]

    @property
    def work(self) -> Path:
        """Working directory of the engine."""
        return self.path / f"{RESTART_PREFIX}{self.restart}" if self.restart else self.path

    @property
    def config(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def log(self) -> Path:
        """Output of the engine. Serving runs use the file name of NVIDIA's inference recipes."""
        streaming = self._streaming()
        if streaming is None:
            return self.work / f"log-{self.name}.out"
        job = f"_{self.job_id}" if self.job_id else ""
        return self.work / f"{self.name}_streaming-{'on' if streaming else 'off'}{job}.out"

    def _streaming(self) -> bool | None:
        """Return whether a serving run streams; None: another kind of run, or its configuration cannot be read."""
        try:
            return read_json(self.config)["workload"].get("streaming")
        except (ConfigError, KeyError, TypeError, AttributeError):
            return None

    @property
    def result(self) -> Path:
        return self.work / RESULT_FILE

    @property
    def submission(self) -> Path:
        """Submission of a Slurm job; written before sbatch is called."""
        return self.path / "submission.json"

    @property
    def allocation(self) -> Path:
        """Nodes allocated to a start of a Slurm job: the first file that it writes."""
        return self.work / "allocation.json"

    @property
    def job_outcome(self) -> Path:
        """Final state of a Slurm job; Slurm itself purges it."""
        return self.path / "ending.json"

    def slurm_output(self, job_id: str) -> Path:
        """Return the output of the job outside of the run's own log."""
        return self.path / f"slurm-{job_id}.out"

    @property
    def origin(self) -> Path:
        """Origin of an imported run; other runs have none."""
        return self.path / "origin.json"

    @property
    def pid_file(self) -> Path:
        return self.work / "pid"

    @property
    def report_page(self) -> Path:
        return self.work / "report.html"

    @property
    def command_line(self) -> Path:
        """The command that started the run, as it was typed; runs of an older llmb have none."""
        return self.path / "command.txt"

    @property
    def profile(self) -> Path:
        return self.work / "profile"

    @property
    def stream_timeline(self) -> Path:
        """Recorded CUDA stream timeline of a profiled out-of-core run."""
        return self.profile / "lanes.json"

    @property
    def profile_page(self) -> Path:
        return self.profile / "profile.html"

    def events(self, rank: int) -> Path:
        return self.work / EVENTS_FILE.format(rank)

    def all_events(self) -> list[Path]:
        """Return the existing event files, one per rank."""
        files = self.work.glob("events.rank*.jsonl")
        return sorted(path for path in files if NUMBER.fullmatch(path.name[len("events.rank") : -len(".jsonl")]))

    def record(self, job_id: str) -> Path:
        return self.path / f"llmb-config_{job_id}.yaml"


def is_run_folder(path: Path) -> bool:
    """Return whether a folder exists and is one of a run, whatever state its files are in.

    A folder that this user may not enter is a ConfigError.
    """
    try:
        return RunFolder(path).config.is_file()
    except PermissionError as error:
        raise ConfigError(f"cannot read {printable_path(path)}: {error.strerror}") from error


def _claim_folder(experiment: Path, stamp: str) -> Path:
    """Create the first free folder of this time stamp; mkdir is what claims it."""
    number = 1
    while True:
        folder = experiment / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # of hundreds created in one second, skip the existing ones
            number = max(number, sum(name.startswith(stamp) for name in os.listdir(experiment))) + 1
        except OSError as error:
            raise write_error(folder, error) from error
