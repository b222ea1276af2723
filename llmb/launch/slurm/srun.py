"""Start one rank per GPU with srun inside an allocation of our job.sh, a user's sbatch or salloc.

    srun_command(config, launch_spec, environ) -> [srun, --nodes=2, ..., python, -m, llmb.train, config.json]
    rendezvous(environ) -> {"MASTER_ADDR": "n1", "MASTER_PORT": "20017"}

Ranks know nothing of Slurm: a line of shell around each maps its variables to those that torchrun sets.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.engine_log import read_log_tail
from llmb.launch.engines.launch_spec import LaunchSpec
from llmb.launch.local import Launcher
from llmb.launch.slurm.nodelist import node_names
from llmb.launch.verdict import Verdict

RANK_WRAPPER = (
    'export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LLMB_HOST="$SLURMD_NODENAME"; '
    'exec "$@"'
)
FIRST_PORT, PORTS = 20000, 12000  # below the ephemeral port range
INTERACTIVE_STEP = "4294967290"  # step id of the shell that salloc starts on the first node

TIME_LIMIT_SIGNAL, END_SIGNAL = signal.SIGUSR1, signal.SIGTERM  # to the job runner: before the time limit, to end a job

# Slurm writes this into a job's output before it ends the job; without DUE TO where a user cancelled it.
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?")


def srun_launcher(output: Path, host: str) -> Launcher:
    """Return srun as a Launcher: it forwards SIGUSR1, on which ranks exit; on SIGTERM it would kill them.

    `output`: the file in which Slurm writes why it ends a job; `host`: on which srun runs, as Slurm names it.
    """
    signals = (TIME_LIMIT_SIGNAL, END_SIGNAL)
    return Launcher(TIME_LIMIT_SIGNAL, signals, lambda number: _signal_verdict(number, output), f"srun on {host}")


def _signal_verdict(number: int, output: Path) -> Verdict:
    if number == TIME_LIMIT_SIGNAL:
        return Verdict("timeout", "stopped shortly before Slurm's time limit")
    causes = _CANCELLED.findall(read_log_tail(output))
    cause = (causes[-1].strip().lower() or "cancelled") if causes else "cancelled, preempted, or a node was lost"
    return Verdict("timeout" if cause == "time limit" else "incomplete", f"ended by Slurm with SIGTERM: {cause}")


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this process may start ranks with srun: in a batch script or salloc's shell, not in a step."""
    return bool(environ.get("SLURM_JOB_ID")) and environ.get("SLURM_STEP_ID") in (None, INTERACTIVE_STEP)


def gpus_per_node_override(environ: Mapping[str, str]) -> int | None:
    """Return GPUS_PER_NODE, which overrides the value of the cluster or of the GPU type."""
    text = environ.get("GPUS_PER_NODE", "")
    if not text:
        return None
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"GPUS_PER_NODE: expected a whole number above 0, got {text!r}")
    return int(text)


def ranks_per_node(config: RunConfig, environ: Mapping[str, str], cluster_gpus: int | None) -> int | None:
    """Return the ranks per node of an allocation. `cluster_gpus`: per node of this cluster; None: by GPU type."""
    override, nodes = gpus_per_node_override(environ), environ.get("SLURM_JOB_NUM_NODES", "")
    if override is None and config.machine.gpu == "cpu" and nodes.isdigit():
        return -(-config.machine.gpus // int(nodes))  # any number of CPU ranks fits a node
    return override or cluster_gpus


def check_allocation_size(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise a ConfigError where the allocation has fewer nodes than the run needs."""
    allocated, needed = environ.get("SLURM_JOB_NUM_NODES", ""), config.machine.nodes
    if allocated.isdigit() and int(allocated) < needed:
        per_node = min(config.machine.gpus, config.machine.gpus_per_node)
        raise ConfigError(
            f"{needed} nodes of {per_node} ranks are needed, this allocation has {allocated}; sbatch -N {needed}"
        )


def srun_command(
    config: RunConfig, launch_spec: LaunchSpec, environ: Mapping[str, str], container: Sequence[str] = ()
) -> list[str]:
    """Return the srun command that starts every rank. `container`: options for pyxis."""
    machine, per_node = config.machine, launch_spec.tasks_per_node(config.machine)
    tasks = machine.gpus if launch_spec.tasks == "gpu" else machine.nodes
    flags = [
        f"--nodes={machine.nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={per_node}",
        "--relative=0",  # the first node is the rendezvous
        "--kill-on-bad-exit=1",
        "--export=ALL",
        f"--mpi={launch_spec.mpi or 'none'}",
    ]
    if cores := environ.get("SLURM_CPUS_PER_TASK"):
        flags.append(f"--cpus-per-task={cores}")  # srun does not inherit it from sbatch
    elif machine.gpu != "cpu":
        flags.append("--cpu-bind=none")  # else a rank and all its threads may share one core
    return ["srun", *flags, *container, "bash", "-c", RANK_WRAPPER, "rank", *launch_spec.command]


def rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT; two jobs on a node have different ports."""
    port = FIRST_PORT + int(environ["SLURM_JOB_ID"]) % PORTS
    return {"MASTER_ADDR": node_names(environ["SLURM_JOB_NODELIST"])[0], "MASTER_PORT": str(port)}
