"""Facts that Slurm reports about the cluster, so that the installer asks the user as little as possible.

    accounts()            -> ["research", "students"]       the user's own, the default first
    partitions()          -> [Partition("gpu", default=True, nodes=128, gres="gpu:h100:8", max_time_s=14400.0), ...]
    cluster_name()        -> "eos"
    node_facts("gpu")     -> NodeFacts("x86_64", "gpu:h100:8", cpus=224, memory_mib=2063000, nodes=128)
    parse_gpus("gpu:h100:8") -> NodeGpus("h100", 8)

Nodes of one partition may differ: each fact is the value that most of them have. All may raise SlurmUnavailable.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from llmb.launch.slurm.slurm_command import run_slurm, unexpected_output

T = TypeVar("T")
NULL_VALUES = ("", "(null)", "N/A", "n/a", "none")


@dataclass(frozen=True)
class Partition:
    """Slurm partition."""

    name: str
    default: bool
    up: bool
    nodes: int
    gres: str | None  # of one node, as Slurm writes it; None: CPUs only
    max_time_s: float | None  # None: no limit


@dataclass(frozen=True)
class NodeFacts:
    """The most common node of a partition."""

    architecture: str | None  # as `uname -m` prints it; None: no node has been up yet
    gres: str | None
    cpus: int
    memory_mib: int
    nodes: int  # how many there are


@dataclass(frozen=True)
class NodeGpus:
    """GPUs of one node."""

    type: str | None  # the administrator's name for them; None: unnamed
    count: int


def accounts() -> list[str]:
    """Return the accounts that this user may charge, the default first; none where Slurm keeps no accounts."""
    user = f"user={_user()}"
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", user, "format=Account"]
    output = run_slurm(command)
    if output.exit_code:
        if "not running a supported accounting_storage" in output.stderr:
            return []
        raise unexpected_output(command, output)
    default = run_slurm(["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=DefaultAccount"])
    return [name for name in dict.fromkeys([*default.lines, *output.lines]) if name]


def partitions() -> list[Partition]:
    """Return all partitions, the default first, then in Slurm's order."""
    command = ["sinfo", "--all", "--noheader", "--format=%P|%a|%D|%G|%l"]
    output = run_slurm(command)
    if output.exit_code:
        raise unexpected_output(command, output)
    return parse_partitions(output.stdout)


def node_facts(partition: str | None = None) -> NodeFacts | None:
    """Return the facts of one partition's nodes, or of all; None: there are none."""
    command = ["scontrol", "--all", "--oneliner", "show", "node"]
    output = run_slurm(command)
    if output.exit_code:
        raise unexpected_output(command, output)
    return parse_nodes(output.stdout, partition)


def cluster_name() -> str | None:
    """Return ClusterName of slurm.conf."""
    return _or_none(configuration().get("ClusterName", ""))


def configuration() -> dict[str, str]:
    """Return the controller's settings by their names in slurm.conf."""
    command = ["scontrol", "show", "config"]
    output = run_slurm(command)
    if output.exit_code:
        raise unexpected_output(command, output)
    return {name.strip(): value.strip() for name, sign, value in (line.partition("=") for line in output.lines) if sign}


def parse_gpus(gres: str | None) -> NodeGpus | None:
    """Parse gpu:8, gpu:h100:8(S:0-1), shard:4,gpu:gb200:4 and the like; of several GPU types, the most frequent."""
    types: list[NodeGpus] = []
    for item in re.sub(r"\([^)]*\)", "", gres or "").split(","):
        name, *fields = item.split(":")
        if name == "gpu":
            count = int(fields.pop()) if fields and fields[-1].isdigit() else 1
            types.append(NodeGpus(fields[0] if fields else None, count))
    return max(types, key=lambda gpus: gpus.count, default=None)


def parse_partitions(text: str) -> list[Partition]:
    """Parse the output of sinfo, which has one line per partition and node configuration."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        name, *fields = line.split("|")
        rows.setdefault(name, []).append(fields)
    parsed = [
        Partition(
            name=name.removesuffix("*"),
            default=name.endswith("*"),
            up=groups[0][0] == "up",
            nodes=sum(int(count) for _, count, _, _ in groups),
            gres=_most_common((_or_none(gres), int(count)) for _, count, gres, _ in groups),
            max_time_s=duration_s(groups[0][3]),
        )
        for name, groups in rows.items()
    ]
    return sorted(parsed, key=lambda partition: not partition.default)


def parse_nodes(text: str, partition: str | None) -> NodeFacts | None:
    """Parse the output of `scontrol --oneliner show node`; `partition`: only its nodes."""
    nodes = [_fields(line) for line in text.splitlines() if line.startswith("NodeName=")]
    if partition is not None:
        nodes = [node for node in nodes if partition in node.get("Partitions", "").split(",")]
    if not nodes:
        return None
    return NodeFacts(
        architecture=_most_common((node["Arch"], 1) for node in nodes if "Arch" in node),
        gres=_most_common((_or_none(node.get("Gres", "")), 1) for node in nodes),
        cpus=_most_common((int(node["CPUTot"]), 1) for node in nodes) or 0,
        memory_mib=_most_common((int(node["RealMemory"]), 1) for node in nodes) or 0,
        nodes=len(nodes),
    )


def duration_s(text: str) -> float | None:
    """Parse [days-][hours:]minutes:seconds as Slurm prints them; None: infinite."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]):
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds + 86400.0 * int(days or 0)


def _fields(line: str) -> dict[str, str]:
    """Parse Key=Value pairs; a word without `=` belongs to a value that is not used here."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _most_common(counted: Iterable[tuple[T, int]]) -> T | None:
    votes: Counter[T] = Counter()
    for value, count in counted:
        votes[value] += count
    return votes.most_common(1)[0][0] if votes else None


def _or_none(text: str) -> str | None:
    return None if text in NULL_VALUES else text


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
