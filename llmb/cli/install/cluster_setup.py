"""Creates or changes cluster_config.yaml for `llmb-install`.

    set_up_cluster(from_options, answer_file, root, facts, ask, saved_answers, dry=False) -> Setup

An answer comes from an option, else from --play, else from an interrupted setup, else from Slurm, else from the user at
the terminal. An existing file belongs to the user: nothing is asked, and only options and --play change it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.cli.install.cluster_answers import AnswerFile, Answers, SavedAnswers
from llmb.cli.install.cluster_choice import Ask, ClusterFacts, check_partitions, complete_answers, partition_answers
from llmb.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from llmb.launch.slurm.cluster_config import Cluster


@dataclass(frozen=True, kw_only=True)
class Setup:
    """State of the cluster's file after a setup."""

    path: Path
    state: str  # written, kept, or would be written
    answers: Answers
    text: str  # of the file
    notes: tuple[str, ...] = ()


def set_up_cluster(
    from_options: Answers,
    answer_file: AnswerFile,
    root: Path,
    facts: ClusterFacts,
    ask: Ask,
    saved_answers: SavedAnswers,
    dry: bool,
) -> Setup:
    """Create or change the file in `root`; with `dry`, only return what it would contain."""
    from llmb.launch.slurm.cluster_config import CLUSTER_FILE, as_yaml, write_cluster
    from llmb.launch.slurm.cluster_file import load_yaml_as_text, to_current_schema

    path = root / CLUSTER_FILE
    requested = from_options.with_defaults(answer_file.answers)
    check_partitions(requested, facts)
    notes = list(answer_file.notes)
    if path.exists():
        before = to_current_schema(load_yaml_as_text(path), path)
        answers, data = _apply(before, requested, answer_file, facts, path)
        notes += _secret_notes(path, before)
        if data == before:
            text = path.read_text(encoding="utf-8", errors="replace")
            return Setup(path=path, state="kept", answers=answers, text=text, notes=tuple(notes))
    else:
        answers = complete_answers(
            requested.with_defaults(_read_saved(saved_answers, facts)), facts, _saving_prompt(ask, saved_answers)
        )
        data = with_answer_file(new_cluster_data(answers, facts.cluster, root), answer_file)
    text = as_yaml(flatten_common(data))
    if dry:
        return Setup(path=path, state="would be written", answers=answers, text=text, notes=tuple(notes))
    backup = write_cluster(path, flatten_common(data))
    if backup:
        notes.append(f"backup of the previous file: {backup}")
    saved_answers.delete()
    return Setup(path=path, state="written", answers=answers, text=text, notes=tuple(notes))


def new_cluster_data(answers: Answers, name: str | None, root: Path) -> dict[str, Any]:
    """Return the data of a new file."""
    return {
        "schema_version": 2,
        "llmb_install": str(root),
        "cluster_name": name,
        "gpu_type": answers.gpu_type,
        "install": {"node_architecture": answers.architecture},
        "environment": {},
        "slurm": {
            **({"common": {"account": answers.account}} if answers.account else {}),
            "gpu": {"partition": answers.gpu_partition, "gres": answers.gpus_per_node or None},
            "cpu": {"partition": answers.cpu_partition, "gres": answers.cpu_gpus_per_node or None},
        },
        "workloads": {"installed": [], "config": {}},
    }


def with_answer_file(data: Mapping[str, Any], answer_file: AnswerFile) -> dict[str, Any]:
    """Return the data with the variables and workloads of an answer file added."""
    workloads = dict(data.get("workloads") or {})
    installed = list(workloads.get("installed") or [])
    workloads["installed"] = installed + [name for name in answer_file.workloads if name not in installed]
    changed = dict(data)
    if answer_file.workloads:
        changed["workloads"] = workloads
    if answer_file.environment:
        changed["environment"] = {**(data.get("environment") or {}), **answer_file.environment}
    return changed


def flatten_common(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with options common to all jobs directly under `slurm`, where NVIDIA's tools look for them."""
    blocks = dict(data["slurm"])
    return {**data, "slurm": {**blocks.pop("common", {}), **blocks}}


def _apply(
    before: Mapping[str, Any], requested: Answers, answer_file: AnswerFile, facts: ClusterFacts, path: Path
) -> tuple[Answers, dict[str, Any]]:
    """Return answers and data of an existing file with the requested changes applied."""
    from llmb.launch.slurm.cluster_config import parse_cluster

    current = _answers_of(parse_cluster(before, path))
    if requested.gpu_partition and requested.gpu_partition != current.gpu_partition:
        # the GPUs of the old partition do not apply to the new one
        requested = requested.with_defaults(partition_answers(requested.gpu_partition, facts))
    answers = requested.with_defaults(current)
    data = with_answer_file(_with_answers(before, current, answers), answer_file)
    effective = _answers_of(parse_cluster(data, path))
    for field, value in requested.non_null().items():
        if (getattr(effective, field) or None) != (value or None):
            raise ConfigError(
                f"{path}: a narrower setting there (environment, SBATCH_*) keeps {field} "
                f"at {getattr(effective, field)}; change it in the file"
            )
    return effective, data


def _with_answers(before: Mapping[str, Any], current: Answers, answers: Answers) -> dict[str, Any]:
    """Return the data with each changed answer where a new file would have it."""
    slurm = {name: dict(block) for name, block in before["slurm"].items()}
    data = {**before, "slurm": slurm}
    for field, block, option in (
        ("account", "common", "account"),
        ("gpu_partition", "gpu", "partition"),
        ("gpus_per_node", "gpu", "gres"),
        ("cpu_partition", "cpu", "partition"),
        ("cpu_gpus_per_node", "cpu", "gres"),
    ):
        value = getattr(answers, field) or None  # without GPUs none are requested from Slurm
        if value != getattr(current, field):
            _set_option(slurm, block, option, value)
    if answers.gpu_type != current.gpu_type:
        data["gpu_type"] = answers.gpu_type
    if answers.architecture != current.architecture:
        data["install"] = {**(before.get("install") or {}), "node_architecture": answers.architecture}
    return data


def _set_option(slurm: dict[str, dict[str, Any]], block: str, option: str, value: Any) -> None:
    """Set an option in its block, replacing any spelling of it there; in `common`, replacing it in every block."""
    from llmb.launch.slurm.sbatch_options import option_name

    names = {option, "gpus-per-node"} if option == "gres" else {option}
    for name in list(slurm) if block == "common" else [block]:
        slurm[name] = {
            key: entry for key, entry in slurm.get(name, {}).items() if option_name(key, f"slurm.{name}") not in names
        }
    slurm.setdefault(block, {})[option] = value


def _answers_of(cluster: "Cluster") -> Answers:
    from llmb.launch.slurm.sbatch_options import gpus_per_node

    return Answers(
        account=cluster.sbatch.get("account"),
        gpu_partition=cluster.sbatch.get("partition"),
        cpu_partition=cluster.cpu_sbatch.get("partition"),
        gpus_per_node=cluster.gpus_per_node,
        cpu_gpus_per_node=gpus_per_node(cluster.cpu_sbatch),
        gpu_type=cluster.gpu_type,
        architecture=cluster.architecture,
    )


def _secret_notes(path: Path, data: Mapping[str, Any]) -> list[str]:
    from llmb.launch.secrets import is_secret

    secrets = [name for name, value in (data.get("environment") or {}).items() if is_secret(name, str(value))]
    return [f"{path} contains the secret {name}: remove it, and export it where you submit jobs" for name in secrets]


def _read_saved(saved_answers: SavedAnswers, facts: ClusterFacts) -> Answers:
    """Return the answers of an interrupted setup, unless a partition no longer exists."""
    answers = saved_answers.read()
    try:
        check_partitions(answers, facts)
    except UnknownName:
        return Answers()
    return answers


def _saving_prompt(ask: Ask, saved_answers: SavedAnswers) -> Ask:
    def ask_and_save(field: str, question: str, choices: Sequence[str]) -> str:
        answer = ask(field, question, choices)
        saved_answers.add(field, answer)
        return answer

    return ask_and_save
