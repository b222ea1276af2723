"""Collectives among nodes, as `llmb-run probe --slurm` measured them, stored for each of the nodes.

$LLMB_INSTALL/.llmb/rates/nodes/h200@n1.json     among n1 and others, the last time that n1 was one of them
"""

from dataclasses import dataclass
from pathlib import Path

from llmb.config.serialization import build, read_json
from llmb.perfmodel.offload.machine_rates import machine_path
from llmb.perfmodel.probe.probe_record import CollectiveRate, Collectives


@dataclass(frozen=True, kw_only=True)
class NodeCollectives:
    """One measurement among all ranks of some nodes."""

    gpu: str
    nodes: tuple[str, ...]
    measured_at: str
    collectives: Collectives

    @property
    def largest(self) -> tuple[CollectiveRate, ...]:
        """Each collective at its largest size."""
        by_operation = {rate.operation: rate for rate in sorted(self.collectives.rates, key=lambda rate: rate.bytes)}
        return tuple(by_operation.values())


def node_path(install: Path, gpu: str, node: str) -> Path:
    """Return where the probe stores what it measured with this node."""
    path = machine_path(install, gpu, node)
    return path.parent / "nodes" / path.name


def stored_node_collectives(gpu: str, install: Path, host: str | None) -> NodeCollectives | None:
    """Return the last measurement with this host among the nodes; None: there is none. Nodes have short names."""
    if host is None:
        return None
    paths = (node_path(install, gpu, name) for name in (host, host.partition(".")[0]))
    path = next((path for path in paths if path.exists()), None)
    return None if path is None else build(NodeCollectives, read_json(path), f"{path}")
