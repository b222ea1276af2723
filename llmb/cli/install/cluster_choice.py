"""Which account, partition and GPU type: chosen from what Slurm tells, and only what it leaves open is asked.

complete(known, look(), asker(sys.stdin.readline, at_terminal=True)) -> Answers
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
    """Gets one answer from the user."""

    def __call__(self, field: str, question: str, choices: Sequence[str]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What Slurm tells."""

    cluster: str | None
    accounts: tuple[str, ...]  # the user's, his default first; none where Slurm keeps no accounts
    partitions: tuple["Partition", ...]
    architecture: Callable[[str], str | None]  # of a partition's nodes; asked for once it is chosen

    def partition(self, names: str) -> "Partition":
        """One of them by its name; of several joined by commas, the first."""
        name = names.split(",")[0]
        return next(partition for partition in self.partitions if partition.name == name)


def look() -> Facts:
    """Ask Slurm; SlurmDown if it does not answer."""
    from llmb.launch.slurm import cluster_facts

    def architecture(partition: str) -> str | None:
        nodes = cluster_facts.node_facts(partition)
        return nodes.architecture if nodes else None

    return Facts(
        cluster=cluster_facts.cluster_name(),
        accounts=tuple(cluster_facts.accounts()),
        partitions=tuple(cluster_facts.partitions()),
        architecture=architecture,
    )


def check_partitions(wanted: Answers, facts: Facts) -> None:
    """A partition that was named must exist; several may be joined by commas."""
    names = [partition.name for partition in facts.partitions]
    for listed in (wanted.gpu_partition, wanted.cpu_partition):
        for name in listed.split(",") if listed is not None else ():
            if name not in names:
                raise UnknownName("partition", name, names)


def complete(known: Answers, facts: Facts, ask: Ask) -> Answers:
    """All answers: those known, else what Slurm says, else what the user says."""
    name = known.gpu_partition or _gpu_partition(facts, ask)
    found = of_partition(name, facts)
    gpus = known.gpus_per_node if known.gpus_per_node is not None else found.gpus_per_node
    kind = known.gpu_type or (found.gpu_type if gpus else "cpu")
    return replace(
        known,
        account=known.account or next(iter(facts.accounts), None),
        gpu_partition=name,
        cpu_partition=known.cpu_partition or _cpu_partition(facts) or name,
        gpus_per_node=gpus,
        gpu_type=kind or _asked_gpu_type(name, ask),
        architecture=known.architecture or facts.architecture(name.split(",")[0]),
    )


def of_partition(name: str, facts: Facts) -> Answers:
    """What its nodes have. A GPU that the table does not know is null."""
    from llmb.launch.slurm.cluster_facts import gpus
    from llmb.perfmodel.hardware import recognise

    there = gpus(facts.partition(name).gres)
    if there is None:
        return Answers(gpus_per_node=0, gpu_type="cpu")
    kind = recognise(there.type.replace("_", " ")) if there.type else None
    return Answers(gpus_per_node=there.count, gpu_type=kind)


def _gpu_partition(facts: Facts, ask: Ask) -> str:
    """The one with GPUs, among several Slurm's default; where none has GPUs, the same of all."""
    up = [partition for partition in facts.partitions if partition.up]
    able = [partition for partition in up if _has_gpus(partition)] or up
    if not able:
        raise ConfigError("Slurm shows no partition that is up; ask its administrator for one")
    default = [partition for partition in able if partition.default]
    if len(able) == 1 or default:
        return (default or able)[0].name
    return ask("gpu_partition", "Which partition do benchmarks run in?", [partition.name for partition in able])


def _cpu_partition(facts: Facts) -> str | None:
    """One without GPUs, the default before the largest."""
    without = [partition for partition in facts.partitions if partition.up and not _has_gpus(partition)]
    best = max(without, key=lambda partition: (partition.default, partition.nodes), default=None)
    return best.name if best else None


def _has_gpus(partition: "Partition") -> bool:
    from llmb.launch.slurm.cluster_facts import gpus

    return gpus(partition.gres) is not None


def _asked_gpu_type(partition: str, ask: Ask) -> str:
    from llmb.perfmodel.hardware import GPUS

    return ask("gpu_type", f"Which GPUs does partition {partition} have?", [key for key in GPUS if key != "cpu"])


def asker(read: Callable[[], str], at_terminal: bool) -> Ask:
    """Asks until the answer is one of the choices; where nobody can be asked, names the option that is missing."""

    def ask(field: str, question: str, choices: Sequence[str]) -> str:
        missing = ConfigError(f"{question} Slurm does not tell; add {OPTION[field]} NAME, one of: {', '.join(choices)}")
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
