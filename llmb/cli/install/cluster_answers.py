"""What `llmb-install` must know about a cluster, and the files that hold such answers.

--record FILE     the answers, to be given again: no secrets
--play FILE       answers instead of questions; keys as in NVIDIA's installer
$LLMB_INSTALL/.llmb/answers.json    what was answered so far, until the set-up is complete
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, LaunchError, UnknownName

PLAYED = (
    "install_path", "slurm", "gpu_type", "node_architecture", "environment_vars", "selected_workloads",
    "venv_type", "install_method",
)  # fmt: skip
WITHOUT_EFFECT = ("venv_type", "install_method")  # of another installer: this one makes no environment of its own
PLAYED_SLURM = {  # key of such a file: field
    "account": "account",
    "gpu_partition": "gpu_partition",
    "cpu_partition": "cpu_partition",
    "gpu_partition_gres": "gpus_per_node",
    "cpu_partition_gres": "cpu_gpus_per_node",
}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Null is not known, or not there."""

    account: str | None = None
    gpu_partition: str | None = None
    cpu_partition: str | None = None
    gpus_per_node: int | None = None
    cpu_gpus_per_node: int | None = None
    gpu_type: str | None = None
    architecture: str | None = None

    def over(self, others: "Answers") -> "Answers":
        """These answers, and where there is none, those of the others."""
        return replace(others, **self.given())

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a file for --play holds."""

    answers: Answers = Answers()  # frozen, so one will do
    install_path: Path | None = None
    environment: dict[str, str] | None = None
    workloads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check(answers: Answers) -> Answers:
    """The same, spelled as the tables have them; a GPU type that does not exist is refused."""
    from llmb.perfmodel.hardware import GPUS

    kind = answers.gpu_type.lower() if answers.gpu_type else None
    if kind is not None and kind not in GPUS:
        raise UnknownName("GPU type", answers.gpu_type, GPUS)
    architecture = {"arm64": "aarch64", "amd64": "x86_64"}.get(answers.architecture or "", answers.architecture)
    for count in (answers.gpus_per_node, answers.cpu_gpus_per_node):
        if count is not None and count < 0:
            raise ConfigError(f"GPUs of a node: expected a whole number, got {count}")
    return replace(answers, gpu_type=kind, architecture=architecture)


def read_played(path: Path) -> Played:
    """The answers in a file that --record, NVIDIA's installer or a person wrote."""
    from llmb.launch.secrets import is_secret
    from llmb.launch.slurm.cluster_file import check_keys, read_text, section

    data = section(read_text(path), str(path))
    check_keys(data, PLAYED, path)
    slurm = section(data.get("slurm"), f"{path}: slurm")
    check_keys(slurm, tuple(PLAYED_SLURM), f"{path}: slurm")
    told: dict[str, Any] = {field: _one(slurm.get(key), f"{path}: slurm.{key}") for key, field in PLAYED_SLURM.items()}
    for count in ("gpus_per_node", "cpu_gpus_per_node"):
        told[count] = _whole(told[count], f"{path}: slurm")
    kind, architecture = (_one(data.get(key), f"{path}: {key}") for key in ("gpu_type", "node_architecture"))
    variables = section(data.get("environment_vars"), f"{path}: environment_vars")
    texts = {name: _one(value, f"{path}: environment_vars.{name}") or "" for name, value in variables.items()}
    secret = [name for name, value in texts.items() if is_secret(name, value)]
    notes = [f"{key} in {path} has no effect here" for key in WITHOUT_EFFECT if data.get(key) is not None]
    notes += [f"{name} is a secret and is not written; export it where you submit" for name in secret]
    chosen = data.get("selected_workloads")
    if chosen is not None and not isinstance(chosen, list):
        raise ConfigError(f"{path}: selected_workloads: expected a list, got {chosen!r}")
    folder = _one(data.get("install_path"), f"{path}: install_path")
    return Played(
        answers=check(Answers(**told, gpu_type=kind, architecture=architecture)),
        install_path=Path(folder).expanduser() if folder else None,
        environment={name: value for name, value in texts.items() if name not in secret},
        workloads=tuple(str(name) for name in chosen or ()),
        notes=tuple(notes),
    )


def recorded(answers: Answers, install: Path, environment: Mapping[str, str], workloads: tuple[str, ...]) -> str:
    """The text of a file for --play that gives the same answers; secrets are left out."""
    from llmb.launch.secrets import is_secret
    from llmb.launch.slurm.cluster_config import as_yaml

    return as_yaml(
        {
            "install_path": str(install),
            "slurm": {key: getattr(answers, field) for key, field in PLAYED_SLURM.items()},
            "gpu_type": answers.gpu_type,
            "node_architecture": answers.architecture,
            "selected_workloads": list(workloads),
            "environment_vars": {name: value for name, value in environment.items() if not is_secret(name, value)},
        }
    )


class Notebook:
    """Answers that were typed, kept at once: a set-up that is killed goes on where it was."""

    def __init__(self, path: Path | None):
        self._path = path  # none: a dry run

    def read(self) -> Answers:
        from llmb.config.serialization import build, read_json

        if self._path is None or not self._path.exists():
            return Answers()
        try:
            return check(build(Answers, read_json(self._path)))
        except ConfigError:  # not worth more than asking again
            return Answers()

    def add(self, field: str, value: str) -> None:
        from llmb.config.serialization import to_json, write_whole
        from llmb.launch.run_folder import make_folder

        if self._path is not None:
            make_folder(self._path.parent)
            write_whole(self._path, to_json({**self.read().given(), field: value}) + "\n")

    def close(self) -> None:
        """The set-up is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def write_new(path: Path, text: str) -> None:
    """A file that must not exist yet, whole or not at all."""
    from llmb.config.serialization import write_whole

    check_new(path)
    write_whole(path, text)


def check_new(path: Path) -> None:
    """Said before anything is asked: a file of the user's is never written over."""
    if path.exists():
        raise ConfigError(f"{path} exists already; record into another file, or move this one away")
    if not path.absolute().parent.is_dir():
        raise LaunchError(f"cannot write {path}: its folder does not exist")


def _one(value: Any, where: str) -> str | None:
    if isinstance(value, (dict, list)):
        raise ConfigError(f"{where}: expected one value, got {value!r}")
    return None if value is None else str(value)


def _whole(text: str | None, where: str) -> int | None:
    from llmb.launch.slurm.sbatch_options import whole

    if text is not None and whole(text) is None:
        raise ConfigError(f"{where}: GPUs of a node: expected a whole number, got {text!r}")
    return None if text is None else whole(text)
