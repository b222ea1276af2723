"""Doctor on every node of a Slurm cluster: one task per node, then facts in which nodes differ."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmb.config.serialization import build
from llmb.errors import ConfigError
from llmb.launch.command import python_path
from llmb.launch.doctor.examination import Examination
from llmb.launch.doctor.odd_nodes import OddFact, odd_nodes
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.node_tasks import NodeState, choose_nodes, run_on_nodes, srun_on_nodes

NODE_TIMEOUT_S = 600.0  # to get an allocation of idle nodes and look at them
COMMAND = ("-m", "llmb.cli.llmb_run", "doctor", "--json")


@dataclass(frozen=True, kw_only=True)
class ClusterExamination:
    """All nodes."""

    nodes: tuple[Examination, ...]
    odd: tuple[OddFact, ...]
    silent: dict[str, str]  # nodes that were asked and did not answer -> what they said instead
    not_asked: tuple[NodeState, ...]  # busy, down or drained


def examine_cluster(cluster: Cluster | None, nodelist: str | None, environ: Mapping[str, str]) -> ClusterExamination:
    """Look at the nodes of this allocation, of a nodelist, or at all idle nodes of the cluster's partition."""
    chosen = choose_nodes(cluster, nodelist, environ)
    environment = {**environ, **(cluster.environment if cluster else {})}
    environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""))
    command = srun_on_nodes([sys.executable, *COMMAND], chosen.names, chosen.options)
    outputs = run_on_nodes(command, environment, NODE_TIMEOUT_S)
    return gathered(chosen.names, outputs.by_node, outputs.errors, chosen.not_asked)


def gathered(
    names: Sequence[str], outputs: Mapping[str, str], errors: str, not_asked: tuple[NodeState, ...] = ()
) -> ClusterExamination:
    """Put together what nodes printed."""
    examined, silent = {}, {}
    for name in names:
        try:
            examined[name] = build(Examination, json.loads(outputs.get(name, "")), name)
        except (ValueError, ConfigError):
            silent[name] = outputs.get(name, "").strip()[:200] or errors[:200] or "no output"
    odd = odd_nodes({name: examination.facts for name, examination in examined.items()})
    return ClusterExamination(nodes=tuple(examined.values()), odd=tuple(odd), silent=silent, not_asked=not_asked)
