"""Ranks that measure collectives: on this machine by torchrun, on nodes of a cluster by srun."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from llmb.errors import LaunchError
from llmb.launch.command import python_path
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.node_tasks import choose_nodes, run_on_nodes, srun_on_nodes
from llmb.launch.slurm.srun import FIRST_PORT, PORTS, RANK_WRAPPER
from llmb.launch.torch_process import measure_in, require_torch

MODULE = "llmb.runtime.probe.collective_probe"
TIMEOUT_S = 600.0  # to get the nodes and measure


def collectives_here(device: str, ranks: int, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure collectives among processes of this machine, one per GPU; fields of perfmodel's Collectives."""
    require_torch("probe")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return measure_in([*torchrun, "-m", MODULE, device], on_progress)


def collectives_on_nodes(
    device: str, ranks_per_node: int, cluster: Cluster | None, nodelist: str | None, environ: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Measure collectives among ranks on several nodes; return fields of perfmodel's Collectives, and the nodes."""
    chosen = choose_nodes(cluster, nodelist, environ)
    environment = {**environ, **(cluster.environment if cluster else {})}
    environment |= {"PYTHONPATH": python_path(environment.get("PYTHONPATH", "")), "MASTER_ADDR": chosen.names[0]}
    environment["MASTER_PORT"] = str(FIRST_PORT + os.getpid() % PORTS)
    rank = ["bash", "-c", RANK_WRAPPER, "rank", sys.executable, "-m", MODULE, device]
    outputs = run_on_nodes(srun_on_nodes(rank, chosen.names, chosen.options, ranks_per_node), environment, TIMEOUT_S)
    try:
        measured: dict[str, Any] = json.loads(outputs.first)
    except ValueError as error:
        raise LaunchError(f"the probe failed: {(outputs.first or outputs.errors)[:300] or 'no output'}") from error
    return measured, chosen.names
