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
from llmb.launch.slurm.node_tasks import NodeState, node_options, node_states, run_on_nodes, srun_on_nodes
from llmb.launch.slurm.nodelist import node_names
from llmb.launch.slurm.srun import in_allocation

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
    not_asked: tuple[NodeState, ...] = ()
    options: dict[str, str] = {}
    if in_allocation(environ):
        names = node_names(nodelist or environ.get("SLURM_JOB_NODELIST"))
    else:
        options = {**node_options(cluster, on_cpu=cluster is not None and cluster.gpu_type == "cpu"), "time": "10"}
        names = node_names(nodelist)
        if not names:
            states = node_states(options.get("partition"))
            names = tuple(state.name for state in states if state.usable)
            not_asked = tuple(state for state in states if not state.usable)
    if not names:
        raise ConfigError(f"no node to look at: {_states(not_asked)}; name some with --nodelist")
    environment = {**environ, **(cluster.environment if cluster else {})}
    environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""))
    command = srun_on_nodes([sys.executable, *COMMAND], names, options)
    outputs = run_on_nodes(command, environment, NODE_TIMEOUT_S)
    return gathered(names, outputs.by_node, outputs.errors, not_asked)


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


def _states(states: Sequence[NodeState]) -> str:
    return ", ".join(f"{state.name} is {state.state}" for state in states) or "Slurm lists none"
