"""Choice of account, partition and GPU type from what Slurm reports; only what remains open is asked.

complete_answers(answers, query_cluster(), terminal_prompt(sys.stdin.readline, at_terminal=True)) -> Answers
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from llmb.cli.install.cluster_answers import Answers
from llmb.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from llmb.launch.slurm.cluster_facts import Partition

OPTION = {"gpu_partition": "--partition", "gpu_type": "--gpu-type"}


class Ask(Protocol):
    """Prompt for one answer of the user."""

    def __call__(self, field: str, question: str, choices: Sequence[str]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """Facts that Slurm reports about the cluster."""

    cluster: str | None
    accounts: tuple[str, ...]  # of the user, the default first; empty without accounting
    partitions: tuple["Partition", ...]
    architecture: Callable[[str], str | None]  # of a partition's nodes; queried once it is chosen

    def partition(self, names: str) -> "Partition":
        """Return a partition by name; of several joined by commas, the first."""
        name = names.split(",")[0]
        return next(partition for partition in self.partitions if partition.name == name)


def query_cluster() -> ClusterFacts:
    """Query Slurm; raise SlurmUnavailable if it does not respond."""
    from llmb.launch.slurm import cluster_facts

    def architecture(partition: str) -> str | None:
        nodes = cluster_facts.node_facts(partition)
        return nodes.architecture if nodes else None

    return ClusterFacts(
        cluster=cluster_facts.cluster_name(),
        accounts=tuple(cluster_facts.accounts()),
        partitions=tuple(cluster_facts.partitions()),
        architecture=architecture,
    )


def facts_text(facts: ClusterFacts) -> str:
    """Return what Slurm reports, as tables."""
    from llmb.report.table import render

    rows = [
        (
            p.name,
            ", ".join(word for word, holds in (("default", p.default), ("down", not p.up)) if holds),
            p.nodes,
            p.gres,
        )
        for p in facts.partitions
    ]
    accounts = ", ".join(facts.accounts) or "none: no accounting"
    table = render(("partition", "state", "nodes", "GPUs of a node"), rows)
    return f"Slurm reports cluster {facts.cluster}, accounts {accounts}\n{table}"


def check_partitions(requested: Answers, facts: ClusterFacts) -> None:
    """Refuse partitions that do not exist; several may be joined by commas."""
    names = [partition.name for partition in facts.partitions]
    for value in (requested.gpu_partition, requested.cpu_partition):
        for name in value.split(",") if value is not None else ():
            if name not in names:
                raise UnknownName("partition", name, names)


def complete_answers(answers: Answers, facts: ClusterFacts, ask: Ask) -> Answers:
    """Return the answers with null fields filled in from Slurm, or else by asking the user."""
    name = answers.gpu_partition or _gpu_partition(facts, ask)
    from_slurm = partition_answers(name, facts)
    gpus = answers.gpus_per_node if answers.gpus_per_node is not None else from_slurm.gpus_per_node
    kind = answers.gpu_type or (from_slurm.gpu_type if gpus else "cpu")
    return replace(
        answers,
        account=answers.account or next(iter(facts.accounts), None),
        gpu_partition=name,
        cpu_partition=answers.cpu_partition or _cpu_partition(facts) or name,
        gpus_per_node=gpus,
        gpu_type=kind or _ask_gpu_type(name, facts, ask),
        architecture=answers.architecture or facts.architecture(name.split(",")[0]),
    )


def partition_answers(name: str, facts: ClusterFacts) -> Answers:
    """Return the GPUs of a partition's nodes; the type is null if it is not in the table of GPUs."""
    from llmb.launch.slurm.cluster_facts import parse_gpus
    from llmb.perfmodel.hardware import identify_gpu

    gpus = parse_gpus(facts.partition(name).gres)
    if gpus is None:
        return Answers(gpus_per_node=0, gpu_type="cpu")
    kind = identify_gpu(gpus.type.replace("_", " ")) if gpus.type else None
    return Answers(gpus_per_node=gpus.count, gpu_type=kind)


def _gpu_partition(facts: ClusterFacts, ask: Ask) -> str:
    """Return the partition with GPUs, of several Slurm's default; if none has GPUs, choose among all."""
    up = [partition for partition in facts.partitions if partition.up]
    candidates = [partition for partition in up if _has_gpus(partition)] or up
    if not candidates:
        raise ConfigError("Slurm shows no partition that is up; ask its administrator for one")
    default = [partition for partition in candidates if partition.default]
    if len(candidates) == 1 or default:
        return (default or candidates)[0].name
    return ask("gpu_partition", "Which partition do benchmarks run in?", [partition.name for partition in candidates])


def _cpu_partition(facts: ClusterFacts) -> str | None:
    """Return a partition without GPUs: the default, or else the largest."""
    without = [partition for partition in facts.partitions if partition.up and not _has_gpus(partition)]
    best = max(without, key=lambda partition: (partition.default, partition.nodes), default=None)
    return best.name if best else None


def _has_gpus(partition: "Partition") -> bool:
    from llmb.launch.slurm.cluster_facts import parse_gpus

    return parse_gpus(partition.gres) is not None


def _ask_gpu_type(partition: str, facts: ClusterFacts, ask: Ask) -> str:
    """Ask for the GPU type: one of the table, or Slurm's name for a GPU that is not in it."""
    from llmb.launch.slurm.cluster_facts import parse_gpus
    from llmb.perfmodel.hardware import GPUS, UNLISTED, gpu_key

    gpus = parse_gpus(facts.partition(partition).gres)
    unlisted = f"{UNLISTED}{gpu_key(gpus.type) if gpus and gpus.type else 'gpu'}"
    choices = [*(key for key in GPUS if key != "cpu"), unlisted, "cpu"]  # cpu: jobs are not to use them
    return ask("gpu_type", f"Which GPUs does partition {partition} have?", choices)


def terminal_prompt(read: Callable[[], str], at_terminal: bool) -> Ask:
    """Return a prompt that asks until the answer is a choice; without a terminal it names the missing option."""

    def ask(field: str, question: str, choices: Sequence[str]) -> str:
        missing = ConfigError(
            f"{question} Slurm does not report it; add {OPTION[field]} NAME, one of: {', '.join(choices)}"
        )
        if not at_terminal:
            raise missing
        numbered = {str(number): name for number, name in enumerate(choices, 1)}
        print(question, *(f"  {number}  {name}" for number, name in numbered.items()), sep="\n", file=sys.stderr)
        while True:
            print(f"a number or a name ({OPTION[field]}): ", end="", file=sys.stderr, flush=True)
            line = read()
            answer = line.strip()
            if not line:  # the end of the input
                raise missing
            if answer in choices:
                return answer
            if answer in numbered:
                return numbered[answer]

    return ask
