"""Answers to the questions of `llmb-install` about a cluster, and the files that store them.

--record FILE     write the answers to a file, without secrets
--play FILE       read the answers from a file; keys as in NVIDIA's installer
$LLMB_INSTALL/.llmb/answers.json    answers so far, until the setup is complete
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, LaunchError

ANSWER_FILE_KEYS = (
    "install_path", "slurm", "gpu_type", "node_architecture", "environment_vars", "selected_workloads",
    "venv_type", "install_method",
)  # fmt: skip
IGNORED_KEYS = ("venv_type", "install_method")  # of NVIDIA's installer: this one creates no Python environment
SLURM_KEYS = {  # key of an answer file: field of Answers
    "account": "account",
    "gpu_partition": "gpu_partition",
    "cpu_partition": "cpu_partition",
    "gpu_partition_gres": "gpus_per_node",
    "cpu_partition_gres": "cpu_gpus_per_node",
}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Description of a cluster. Null: unknown, or the cluster has none."""

    account: str | None = None
    gpu_partition: str | None = None
    cpu_partition: str | None = None
    gpus_per_node: int | None = None
    cpu_gpus_per_node: int | None = None
    gpu_type: str | None = None
    architecture: str | None = None

    def with_defaults(self, defaults: "Answers") -> "Answers":
        """Return these answers, with null fields taken from `defaults`."""
        return replace(defaults, **self.non_null())

    def non_null(self) -> dict[str, Any]:
        """Return the fields that are not null."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class AnswerFile:
    """Contents of a file for --play."""

    answers: Answers = Answers()
    install_path: Path | None = None
    environment: dict[str, str] | None = None
    workloads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check(answers: Answers) -> Answers:
    """Return the answers in canonical spelling; refuse an unknown GPU type."""
    from llmb.perfmodel.hardware import UNLISTED, is_listed, parse_gpu_type

    key = parse_gpu_type(answers.gpu_type) if answers.gpu_type else None
    kind = key if key is None or is_listed(key) else f"{UNLISTED}{key}"
    architecture = {"arm64": "aarch64", "amd64": "x86_64"}.get(answers.architecture or "", answers.architecture)
    for count in (answers.gpus_per_node, answers.cpu_gpus_per_node):
        if count is not None and count < 0:
            raise ConfigError(f"GPUs of a node: expected a whole number, got {count}")
    return replace(answers, gpu_type=kind, architecture=architecture)


def read_answer_file(path: Path) -> AnswerFile:
    """Read a file that --record, NVIDIA's installer or a person wrote."""
    from llmb.launch.secrets import is_secret
    from llmb.launch.slurm.cluster_file import check_keys, load_yaml_as_text, section

    data = section(load_yaml_as_text(path), str(path))
    check_keys(data, ANSWER_FILE_KEYS, path)
    slurm = section(data.get("slurm"), f"{path}: slurm")
    check_keys(slurm, tuple(SLURM_KEYS), f"{path}: slurm")
    fields: dict[str, Any] = {
        field: _scalar(slurm.get(key), f"{path}: slurm.{key}") for key, field in SLURM_KEYS.items()
    }
    for count in ("gpus_per_node", "cpu_gpus_per_node"):
        fields[count] = _count(fields[count], f"{path}: slurm")
    kind, architecture = (_scalar(data.get(key), f"{path}: {key}") for key in ("gpu_type", "node_architecture"))
    variables = section(data.get("environment_vars"), f"{path}: environment_vars")
    texts = {name: _scalar(value, f"{path}: environment_vars.{name}") or "" for name, value in variables.items()}
    secret = [name for name, value in texts.items() if is_secret(name, value)]
    notes = [f"{key} in {path} has no effect here" for key in IGNORED_KEYS if data.get(key) is not None]
    notes += [f"{name} is a secret and is not written; export it where you submit jobs" for name in secret]
    workloads = data.get("selected_workloads")
    if workloads is not None and not isinstance(workloads, list):
        raise ConfigError(f"{path}: selected_workloads: expected a list, got {workloads!r}")
    folder = _scalar(data.get("install_path"), f"{path}: install_path")
    return AnswerFile(
        answers=check(Answers(**fields, gpu_type=kind, architecture=architecture)),
        install_path=Path(folder).expanduser() if folder else None,
        environment={name: value for name, value in texts.items() if name not in secret},
        workloads=tuple(str(name) for name in workloads or ()),
        notes=tuple(notes),
    )


def answer_file_text(
    answers: Answers, install: Path, environment: Mapping[str, str], workloads: tuple[str, ...]
) -> str:
    """Return the text of a file for --play with these answers, without secrets."""
    from llmb.launch.secrets import is_secret
    from llmb.launch.slurm.cluster_config import as_yaml

    return as_yaml(
        {
            "install_path": str(install),
            "slurm": {key: getattr(answers, field) for key, field in SLURM_KEYS.items()},
            "gpu_type": answers.gpu_type,
            "node_architecture": answers.architecture,
            "selected_workloads": list(workloads),
            "environment_vars": {name: value for name, value in environment.items() if not is_secret(name, value)},
        }
    )


class SavedAnswers:
    """File of typed answers, each saved at once, so that a killed setup resumes where it was."""

    def __init__(self, path: Path | None):
        self._path = path  # None: a dry run

    def read(self) -> Answers:
        from llmb.config.serialization import build, read_json

        if self._path is None or not self._path.exists():
            return Answers()
        try:
            return check(build(Answers, read_json(self._path)))
        except ConfigError:  # ask again
            return Answers()

    def add(self, field: str, value: str) -> None:
        from llmb.config.serialization import to_json, write_atomic
        from llmb.launch.run_folder import make_folder

        if self._path is not None:
            make_folder(self._path.parent)
            write_atomic(self._path, to_json({**self.read().non_null(), field: value}) + "\n")

    def delete(self) -> None:
        """Delete the file: the setup is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def write_new_file(path: Path, text: str) -> None:
    """Write a file that must not exist yet, atomically."""
    from llmb.config.serialization import write_atomic

    check_new_file(path)
    write_atomic(path, text)


def check_new_file(path: Path) -> None:
    """Refuse to overwrite a file; called before any question is asked."""
    if path.exists():
        raise ConfigError(f"{path} exists already; record into another file, or move this one away")
    if not path.absolute().parent.is_dir():
        raise LaunchError(f"cannot write {path}: its folder does not exist")


def _scalar(value: Any, where: str) -> str | None:
    if isinstance(value, (dict, list)):
        raise ConfigError(f"{where}: expected one value, got {value!r}")
    return None if value is None else str(value)


def _count(text: str | None, where: str) -> int | None:
    from llmb.launch.slurm.sbatch_options import parse_count

    if text is not None and parse_count(text) is None:
        raise ConfigError(f"{where}: GPUs of a node: expected a whole number, got {text!r}")
    return None if text is None else parse_count(text)
