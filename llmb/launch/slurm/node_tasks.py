"""One task on each of several nodes through srun, outside of any run: what each printed, by node.

    chosen = choose_nodes(cluster, nodelist, os.environ)
    run_on_nodes(srun_on_nodes(["hostname"], chosen.names, chosen.options), os.environ, timeout_s=60) -> NodeOutputs

Inside an allocation the tasks run there; elsewhere srun waits for one with the options of the cluster's file.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmb.errors import ConfigError, LaunchError
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.nodelist import node_names
from llmb.launch.slurm.slurm_command import run_slurm, unexpected_output
from llmb.launch.slurm.srun import in_allocation

USABLE_STATES = ("idle",)
NO_NEW_JOBS = ("down", "drain", "drng", "fail", "failg", "inval", "unk")  # on which srun would wait for an operator
# Options of a cluster's file that srun needs to get the same nodes, with their GPUs.
OPTIONS = ("account", "partition", "qos", "reservation", "constraint", "gres", "gpus-per-node", "mem", "exclusive")
TIME_LIMIT_MINUTES = "10"
LABEL = re.compile(r"\s*(\d+): ?(.*)")  # of srun --label
MARK = "llmb-node"  # first word of the line that names a task's node


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """One node as Slurm sees it."""

    name: str
    state: str  # idle, mix, alloc, down, drain, ...
    reason: str | None = None  # why it is down or drained

    @property
    def usable(self) -> bool:
        return self._base in USABLE_STATES

    @property
    def takes_jobs(self) -> bool:
        """Whether a job gets this node, if only after others."""
        return self._base not in NO_NEW_JOBS

    @property
    def _base(self) -> str:
        return self.state.rstrip("*$@~#!%^-")

    def __str__(self) -> str:
        return f"{self.name} is {self.state}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class NodeOutputs:
    """Output of tasks to stdout, and of srun to stderr."""

    by_node: dict[str, str]  # of the last task of a node
    errors: str
    first: str = ""  # of task 0


def node_states(partition: str | None) -> list[NodeState]:
    """Return the nodes of a partition, or of all."""
    selected = [] if partition is None else [f"--partition={partition}"]
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%t|%E", *selected]
    output = run_slurm(command)
    if output.exit_code:
        raise unexpected_output(command, output)
    states = {}
    for line in output.lines:
        name, state, reason = [*line.split("|", 2), "", ""][:3]
        states[name] = NodeState(name=name, state=state, reason=reason if reason not in ("", "none") else None)
    return list(states.values())


@dataclass(frozen=True, kw_only=True)
class ChosenNodes:
    """Nodes to run on, and srun's options to get them."""

    names: tuple[str, ...]
    options: dict[str, str]
    not_asked: tuple[NodeState, ...] = ()  # busy, down or drained


def choose_nodes(cluster: Cluster | None, nodelist: str | None, environ: Mapping[str, str]) -> ChosenNodes:
    """Choose the nodes of this allocation, of a nodelist, or all idle nodes of the cluster's partition."""
    if in_allocation(environ):
        names = node_names(nodelist or environ.get("SLURM_JOB_NODELIST"))
        return ChosenNodes(names=names, options={"overlap": ""})  # beside a run that has all CPUs and GPUs
    on_cpu = cluster is not None and cluster.gpu_type == "cpu"
    options = {**node_options(cluster, on_cpu), "time": TIME_LIMIT_MINUTES}
    names = node_names(nodelist)
    others: tuple[NodeState, ...] = ()
    if names:
        _check_nodes(names, node_states(None))
    else:
        states = node_states(options.get("partition"))
        names = tuple(state.name for state in states if state.usable)
        others = tuple(state for state in states if not state.usable)
    if not names:
        listed = ", ".join(map(str, others)) or "Slurm lists none"
        raise ConfigError(f"no idle node: {listed}; name busy ones with --nodelist to wait for them")
    return ChosenNodes(names=names, options=options, not_asked=others)


def _check_nodes(names: Sequence[str], states: Sequence[NodeState]) -> None:
    """Refuse nodes that srun would reject, or wait for until an operator resumes them."""
    by_name = {state.name: state for state in states}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(f"Slurm has no node {', '.join(unknown)}; `sinfo -N` lists those for --nodelist")
    if unavailable := [by_name[name] for name in names if not by_name[name].takes_jobs]:
        raise ConfigError(f"no job gets these nodes: {', '.join(map(str, unavailable))}; leave them out of --nodelist")


def node_options(cluster: Cluster | None, on_cpu: bool) -> dict[str, str]:
    """Return the options of the cluster's file that decide on which nodes a task runs, and what it sees there."""
    if cluster is None:
        return {}
    options = cluster.cpu_sbatch if on_cpu else cluster.sbatch
    return {name: options[name] for name in OPTIONS if name in options}


def srun_on_nodes(
    command: Sequence[str], names: Sequence[str], options: Mapping[str, str], tasks_per_node: int = 1
) -> list[str]:
    """Return the srun command; without names, on as many nodes as the allocation has."""
    flags = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
    if names:
        flags += [f"--nodes={len(names)}", f"--nodelist={','.join(names)}", f"--ntasks={len(names) * tasks_per_node}"]
    flags += [f"--ntasks-per-node={tasks_per_node}", "--kill-on-bad-exit=0", "--label", "--mpi=none", "--export=ALL"]
    script = f'echo "{MARK} $SLURMD_NODENAME"; exec "$@"'
    return ["srun", *flags, "bash", "-c", script, "task", *command]


def run_on_nodes(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> NodeOutputs:
    """Run an srun command of `srun_on_nodes`; a task that fails does not keep the others from being read."""
    try:
        process = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise LaunchError("Slurm is not installed on this machine: no program srun") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"the nodes did not answer within {timeout_s:g} s: are they free? see squeue") from error
    outputs = parse_labelled(process.stdout)
    errors = " ".join(process.stderr.split())
    if not outputs:
        raise LaunchError(f"srun failed: {errors or f'exit {process.returncode}'}")
    return NodeOutputs(by_node=dict(outputs.values()), errors=errors, first=outputs.get(0, ("", ""))[1])


def parse_labelled(text: str) -> dict[int, tuple[str, str]]:
    """Return node and output of each task, put together again: srun breaks long lines."""
    pieces: dict[str, list[str]] = {}
    for line in text.splitlines():
        if label := LABEL.fullmatch(line):
            pieces.setdefault(label[1], []).append(label[2])
    outputs = {}
    for task, lines in pieces.items():
        if lines[0].startswith(MARK):
            outputs[int(task)] = lines[0].removeprefix(MARK).strip(), "".join(lines[1:])
    return outputs
