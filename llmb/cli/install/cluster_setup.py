"""The part of `llmb-install` that makes cluster_config.yaml, or changes it.

    set_up(wishes, played, root, facts, ask, notebook, dry=False) -> Setup

An answer comes from an option, else from --play, else from an interrupted set-up, else from Slurm, else from whoever
sits at the terminal. A file that exists is the user's own: nothing is asked, and only options and --play change it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.cli.install.cluster_answers import Answers, Notebook, Played
from llmb.cli.install.cluster_choice import Ask, Facts, check_partitions, complete, of_partition
from llmb.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from llmb.launch.slurm.cluster_config import Cluster


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What became of the cluster's file."""

    path: Path
    state: str  # written, kept, or would be written
    answers: Answers
    text: str  # what the file holds
    notes: tuple[str, ...] = ()


def set_up(wishes: Answers, played: Played, root: Path, facts: Facts, ask: Ask, notebook: Notebook, dry: bool) -> Setup:
    """Make or change the file in `root`, or with `dry` say what would stand in it."""
    from llmb.launch.slurm.cluster_config import FILE, as_yaml, write_cluster
    from llmb.launch.slurm.cluster_file import as_current, read_text

    path = root / FILE
    wanted = wishes.over(played.answers)
    check_partitions(wanted, facts)
    notes = list(played.notes)
    if path.exists():
        before = as_current(read_text(path), path)
        answers, data = _changed(before, wanted, played, facts, path)
        notes += _said_about(path, before)
        if data == before:
            text = path.read_text(encoding="utf-8", errors="replace")
            return Setup(path=path, state="kept", answers=answers, text=text, notes=tuple(notes))
    else:
        answers = complete(wanted.over(_answered(notebook, facts)), facts, _noting(ask, notebook))
        data = with_played(fresh(answers, facts.cluster, root), played)
    text = as_yaml(unnested(data))
    if dry:
        return Setup(path=path, state="would be written", answers=answers, text=text, notes=tuple(notes))
    kept = write_cluster(path, unnested(data))
    if kept:
        notes.append(f"the file as it was: {kept}")
    notebook.close()
    return Setup(path=path, state="written", answers=answers, text=text, notes=tuple(notes))


def fresh(answers: Answers, name: str | None, root: Path) -> dict[str, Any]:
    """The data of a new file."""
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


def with_played(data: Mapping[str, Any], played: Played) -> dict[str, Any]:
    """The variables and workloads of a played file besides those that are there."""
    workloads = dict(data.get("workloads") or {})
    installed = list(workloads.get("installed") or [])
    workloads["installed"] = installed + [name for name in played.workloads if name not in installed]
    changed = dict(data)
    if played.workloads:
        changed["workloads"] = workloads
    if played.environment:
        changed["environment"] = {**(data.get("environment") or {}), **played.environment}
    return changed


def unnested(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is common to all jobs directly under `slurm`, where other readers of the file look for it."""
    blocks = dict(data["slurm"])
    return {**data, "slurm": {**blocks.pop("common", {}), **blocks}}


def _changed(
    before: Mapping[str, Any], wanted: Answers, played: Played, facts: Facts, path: Path
) -> tuple[Answers, dict[str, Any]]:
    """An existing file's answers and data with what is wanted on top."""
    from llmb.launch.slurm.cluster_config import parse_cluster

    now = _answers_of(parse_cluster(before, path))
    if wanted.gpu_partition and wanted.gpu_partition != now.gpu_partition:
        wanted = wanted.over(of_partition(wanted.gpu_partition, facts))  # the old one's GPUs say nothing about its own
    answers = wanted.over(now)
    data = with_played(_with_answers(before, now, answers), played)
    effective = _answers_of(parse_cluster(data, path))
    for field, value in wanted.given().items():
        if (getattr(effective, field) or None) != (value or None):
            raise ConfigError(
                f"{path}: a narrower setting there (environment, SBATCH_*) keeps {field} "
                f"at {getattr(effective, field)}; change it in the file"
            )
    return effective, data


def _with_answers(before: Mapping[str, Any], now: Answers, answers: Answers) -> dict[str, Any]:
    """The data with each answer that differs put where a new file would have it."""
    slurm = {name: dict(block) for name, block in before["slurm"].items()}
    data = {**before, "slurm": slurm}
    for field, block, option in (
        ("account", "common", "account"),
        ("gpu_partition", "gpu", "partition"),
        ("gpus_per_node", "gpu", "gres"),
        ("cpu_partition", "cpu", "partition"),
        ("cpu_gpus_per_node", "cpu", "gres"),
    ):
        value = getattr(answers, field) or None  # no GPUs: nothing to ask Slurm for
        if value != getattr(now, field):
            _put(slurm, block, option, value)
    if answers.gpu_type != now.gpu_type:
        data["gpu_type"] = answers.gpu_type
    if answers.architecture != now.architecture:
        data["install"] = {**(before.get("install") or {}), "node_architecture": answers.architecture}
    return data


def _put(slurm: dict[str, dict[str, Any]], block: str, option: str, value: Any) -> None:
    """Set an option in its block, in place of however it was spelled there; for all jobs, in place of each block's."""
    from llmb.launch.slurm.sbatch_options import option_name

    meant = {option, "gpus-per-node"} if option == "gres" else {option}
    for name in list(slurm) if block == "common" else [block]:
        slurm[name] = {
            key: held for key, held in slurm.get(name, {}).items() if option_name(key, f"slurm.{name}") not in meant
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


def _said_about(path: Path, data: Mapping[str, Any]) -> list[str]:
    from llmb.launch.secrets import is_secret

    held = [name for name, value in (data.get("environment") or {}).items() if is_secret(name, str(value))]
    return [f"{path} holds {name}: take it out, and export it where you submit" for name in held]


def _answered(notebook: Notebook, facts: Facts) -> Answers:
    """What an interrupted set-up was told, as far as it can still be true."""
    before = notebook.read()
    try:
        check_partitions(before, facts)
    except UnknownName:
        return Answers()
    return before


def _noting(ask: Ask, notebook: Notebook) -> Ask:
    def asked(field: str, question: str, choices: Sequence[str]) -> str:
        answer = ask(field, question, choices)
        notebook.add(field, answer)
        return answer

    return asked
