"""One rank per GPU by srun, inside an allocation, whoever made it: sbatch with our job.sh, a user's sbatch or salloc.

    ranks_command(config, order, environ) -> [srun, --nodes=2, ..., bash, -c, ..., python, -m, llmb.train, config.json]
    rendezvous(environ) -> {"MASTER_ADDR": "n1", "MASTER_PORT": "20017"}

Ranks know nothing of Slurm: a line of shell around each turns its variables into those that every launcher sets.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import EngineOrder
from llmb.launch.local import Launcher
from llmb.launch.slurm.nodelist import node_names
from llmb.launch.verdict import Verdict

RANK = (
    'export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LLMB_HOST="$SLURMD_NODENAME"; '
    'exec "$@"'
)
PORTS = (20000, 12000)  # the first, and how many: below those that systems give out by themselves
INTERACTIVE_STEP = "4294967290"  # the shell of an salloc that Slurm itself put onto the first node

WARNING, END = signal.SIGUSR1, signal.SIGTERM  # what Slurm sends the steward before a time limit, and to end a job

# What Slurm writes into a job's output before it ends it. It says no more where a user has cancelled the job.
_ENDED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?")


def srun(output: Path) -> Launcher:
    """What srun is to a run: it passes SIGUSR1 on, by which ranks end; SIGTERM would make it kill them.

    `output`: the file in which Slurm says why it ends a job.
    """
    return Launcher(WARNING, (WARNING, END), lambda number: _why(number, output))


def _why(number: int, output: Path) -> Verdict:
    if number == WARNING:
        return Verdict("timeout", "stopped shortly before Slurm's time limit")
    try:
        found = _ENDED.findall(output.read_text(errors="replace"))
    except OSError:
        found = []
    why = (found[-1].strip().lower() or "cancelled") if found else "cancelled, preempted, or a node was lost"
    return Verdict("timeout" if why == "time limit" else "incomplete", f"ended by Slurm with SIGTERM: {why}")


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process may start ranks by srun: in a batch script or the shell of an salloc, not in a step."""
    return bool(environ.get("SLURM_JOB_ID")) and environ.get("SLURM_STEP_ID") in (None, INTERACTIVE_STEP)


def asked_per_node(environ: Mapping[str, str]) -> int | None:
    """GPUS_PER_NODE, which counts more than what is known of the cluster or of the GPU type."""
    given = environ.get("GPUS_PER_NODE", "")
    if not given:
        return None
    if not given.isdigit() or int(given) == 0:
        raise ConfigError(f"GPUS_PER_NODE: expected a whole number above 0, got {given!r}")
    return int(given)


def ranks_per_node(config: RunConfig, environ: Mapping[str, str], known: int | None) -> int | None:
    """How ranks are spread over an allocation. `known`: GPUs that a node of this cluster has; none: by their type."""
    asked, nodes = asked_per_node(environ), environ.get("SLURM_JOB_NUM_NODES", "")
    if asked is None and config.machine.gpu == "cpu" and nodes.isdigit():
        return -(-config.machine.gpus // int(nodes))  # of CPUs a node has as many as one likes
    return asked or known


def check_room(config: RunConfig, environ: Mapping[str, str]) -> None:
    """A ConfigError where the allocation has fewer nodes than the run needs."""
    here, needed = environ.get("SLURM_JOB_NUM_NODES", ""), config.machine.nodes
    if here.isdigit() and int(here) < needed:
        each = min(config.machine.gpus, config.machine.gpus_per_node)
        raise ConfigError(f"{needed} nodes of {each} ranks are needed, this allocation has {here}; sbatch -N {needed}")


def ranks_command(
    config: RunConfig, order: EngineOrder, environ: Mapping[str, str], container: Sequence[str] = ()
) -> list[str]:
    """What starts every rank, from the first node of the allocation. `container`: what pyxis is told."""
    machine, per_node = config.machine, order.tasks_per_node(config.machine)
    tasks = machine.gpus if order.tasks == "gpu" else machine.nodes
    flags = [
        f"--nodes={machine.nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={per_node}",
        "--relative=0",  # the first node is where ranks meet
        "--kill-on-bad-exit=1",
        "--export=ALL",
        f"--mpi={order.mpi or 'none'}",
    ]
    if cores := environ.get("SLURM_CPUS_PER_TASK"):
        flags.append(f"--cpus-per-task={cores}")  # sbatch's is not passed on by itself
    elif machine.gpu != "cpu":
        flags.append("--cpu-bind=none")  # else a rank and all its threads may share one core
    return ["srun", *flags, *container, "bash", "-c", RANK, "rank", *order.command]


def rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """Where ranks find one another; two jobs on a node have different ports."""
    first, count = PORTS
    port = first + int(environ["SLURM_JOB_ID"]) % count
    return {"MASTER_ADDR": node_names(environ["SLURM_JOB_NODELIST"])[0], "MASTER_PORT": str(port)}
