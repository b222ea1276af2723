"""What a Slurm cluster says of itself, for an installer that should ask its user as little as possible.

    accounts()            -> ["research", "students"]       the user's own, his default first
    partitions()          -> [Partition("gpu", default=True, nodes=128, gres="gpu:h100:8", max_time_s=14400.0), ...]
    cluster_name()        -> "eos"
    node_facts("gpu")     -> NodeFacts("x86_64", "gpu:h100:8", cpus=224, memory_mib=2063000, nodes=128)
    gpus("gpu:h100:8")    -> Gpus("h100", 8)

Nodes of one partition may differ: of each fact, what most of them say. All may raise SlurmDown.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from llmb.launch.slurm.slurm_command import call, fail

T = TypeVar("T")
NOTHING = ("", "(null)", "N/A", "n/a", "none")


@dataclass(frozen=True)
class Partition:
    """A queue."""

    name: str
    default: bool
    up: bool
    nodes: int
    gres: str | None  # of one node, as Slurm writes it; None: nothing beside CPUs
    max_time_s: float | None  # None: no limit


@dataclass(frozen=True)
class NodeFacts:
    """One node, as most of them are."""

    architecture: str | None  # as `uname -m` prints it; None: no node has been up yet
    gres: str | None
    cpus: int
    memory_mib: int
    nodes: int  # how many were asked


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one node."""

    type: str | None  # the administrator's word for them; None: he gave none
    count: int


def accounts() -> list[str]:
    """Accounts that this user may charge, his default first; none where Slurm keeps no accounts."""
    user = f"user={_user()}"
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", user, "format=Account"]
    answer = call(command)
    if answer.code:
        if "not running a supported accounting_storage" in answer.error:
            return []
        raise fail(command, answer)
    default = call(["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=DefaultAccount"])
    return [name for name in dict.fromkeys([*default.lines, *answer.lines]) if name]


def partitions() -> list[Partition]:
    """All queues, the default first, then in Slurm's order."""
    command = ["sinfo", "--all", "--noheader", "--format=%P|%a|%D|%G|%l"]
    answer = call(command)
    if answer.code:
        raise fail(command, answer)
    return read_partitions(answer.out)


def node_facts(partition: str | None = None) -> NodeFacts | None:
    """Of one partition's nodes, or of all; None: there are none."""
    command = ["scontrol", "--all", "--oneliner", "show", "node"]
    answer = call(command)
    if answer.code:
        raise fail(command, answer)
    return read_nodes(answer.out, partition)


def cluster_name() -> str | None:
    """What the administrator calls it."""
    return _or_none(configuration().get("ClusterName", ""))


def configuration() -> dict[str, str]:
    """The controller's settings, by Slurm's names for them."""
    command = ["scontrol", "show", "config"]
    answer = call(command)
    if answer.code:
        raise fail(command, answer)
    return {name.strip(): value.strip() for name, sign, value in (line.partition("=") for line in answer.lines) if sign}


def gpus(gres: str | None) -> Gpus | None:
    """From gpu:8, gpu:h100:8(S:0-1), shard:4,gpu:gb200:4 and the like; several kinds in one node: the most frequent."""
    found: list[Gpus] = []
    for item in re.sub(r"\([^)]*\)", "", gres or "").split(","):
        name, *rest = item.split(":")
        if name == "gpu":
            count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
            found.append(Gpus(rest[0] if rest else None, count))
    return max(found, key=lambda each: each.count, default=None)


def read_partitions(text: str) -> list[Partition]:
    """sinfo gives one line for each set of nodes that differ."""
    lines: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        name, *fields = line.split("|")
        lines.setdefault(name, []).append(fields)
    found = [
        Partition(
            name=name.removesuffix("*"),
            default=name.endswith("*"),
            up=parts[0][0] == "up",
            nodes=sum(int(count) for _, count, _, _ in parts),
            gres=_most((_or_none(gres), int(count)) for _, count, gres, _ in parts),
            max_time_s=duration_s(parts[0][3]),
        )
        for name, parts in lines.items()
    ]
    return sorted(found, key=lambda partition: not partition.default)


def read_nodes(text: str, partition: str | None) -> NodeFacts | None:
    nodes = [_fields(line) for line in text.splitlines() if line.startswith("NodeName=")]
    if partition is not None:
        nodes = [node for node in nodes if partition in node.get("Partitions", "").split(",")]
    if not nodes:
        return None
    return NodeFacts(
        architecture=_most((node["Arch"], 1) for node in nodes if "Arch" in node),
        gres=_most((_or_none(node.get("Gres", "")), 1) for node in nodes),
        cpus=_most((int(node["CPUTot"]), 1) for node in nodes) or 0,
        memory_mib=_most((int(node["RealMemory"]), 1) for node in nodes) or 0,
        nodes=len(nodes),
    )


def duration_s(text: str) -> float | None:
    """[days-][hours:]minutes:seconds as Slurm prints them; None: infinite."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]):
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds + 86400.0 * int(days or 0)


def _fields(line: str) -> dict[str, str]:
    """Key=Value pairs; a word without `=` belongs to a value nobody needs here."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _most(counted: Iterable[tuple[T, int]]) -> T | None:
    votes: Counter[T] = Counter()
    for value, count in counted:
        votes[value] += count
    return votes.most_common(1)[0][0] if votes else None


def _or_none(text: str) -> str | None:
    return None if text in NOTHING else text


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
