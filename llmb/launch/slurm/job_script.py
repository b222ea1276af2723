"""job.sh of a Slurm run: what sbatch is asked for, and the one process it starts.

    slurm_script(config, rundir, cluster, wishes, [python, "-m", "llmb.cli.job_runner", folder], environment) -> text
    sbatch_arguments(config, rundir, cluster, wishes)    what sbatch must be told beside it

Pure: the same request gives the same text. Whoever asks for an option most closely is heard: the command line, then the
cluster's file, then what follows from the run itself. What makes the run (nodes, ranks, time, signal) nobody else sets.

#SBATCH lines have no quoting to rely on, so a value with anything odd in it goes to sbatch as an argument instead, and
`sbatch job.sh` by hand lacks it. Secrets are in neither: they travel in the environment of whoever submits.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmb.config.spec import Machine, RunConfig
from llmb.errors import ConfigError
from llmb.launch.run_folder import RunDir
from llmb.launch.secrets import is_secret
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.sbatch_options import OF_THE_RUN, merged, parameters

MARGIN_S = 180  # beyond the run's own limit: it is to end by that one, and has its result to write
WARNING_S = 60  # before Slurm's limit comes the signal; Slurm may send it up to a minute early
NVLINK_DOMAIN = {"gb200": 18, "gb300": 18}  # nodes whose GPUs are joined by NVLink
FIRST_CLASS = ("nice", "nodelist", "exclude", "reservation", "segment")  # have a flag of their own

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]*")
_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}
_GPUS = {"gres", "gpus", "gpus-per-task", "gpus-per-socket"}


@dataclass(frozen=True, kw_only=True)
class SlurmWishes:
    """What a command line asks of Slurm."""

    nice: int | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    segment: int | None = None
    arguments: tuple[str, ...] = ()  # key=value or a bare flag, as sbatch names them


def placed(config: RunConfig, gpus_per_node: int | None) -> RunConfig:
    """The run on nodes of this many GPUs, or of as many as its GPU type has; ranks on CPUs are spread alike."""
    if gpus_per_node is None:
        return config
    return replace(config, machine=replace(config.machine, gpus_per_node=gpus_per_node))


def slurm_script(
    config: RunConfig,
    rundir: RunDir,
    cluster: Cluster | None,
    wishes: SlurmWishes,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> str:
    """The text of job.sh. `command`: what the job runs; `environment`: what is set for it."""
    options = job_options(config, rundir, cluster, wishes)
    odd = [name for name, value in options.items() if not _SAFE.fullmatch(value)]
    secret = [name for name, value in environment.items() if is_secret(name, value)]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {_spelled(name, value)}" for name, value in options.items() if name not in odd),
        "# What llmb-run submit has sent to Slurm; sbatch this file to run it again, in a new folder.",
        *(f"# Not as a line above, so to be given to sbatch: --{name}" for name in odd),
        *(f"# Secret, taken from your environment: {name}" for name in secret),
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items() if name not in secret),
        f"exec {shlex.join(command)}",  # in place of the shell: Slurm's signals reach it
    ]
    return "\n".join(lines) + "\n"


def sbatch_arguments(config: RunConfig, rundir: RunDir, cluster: Cluster | None, wishes: SlurmWishes) -> list[str]:
    """The options that job.sh cannot hold."""
    options = job_options(config, rundir, cluster, wishes)
    return [_spelled(name, value) for name, value in options.items() if not _SAFE.fullmatch(value)]


def job_options(config: RunConfig, rundir: RunDir, cluster: Cluster | None, wishes: SlurmWishes) -> dict[str, str]:
    """Every option of the job by its long name; "" is a bare flag."""
    asked = _asked(config, wishes)
    site = _site(config, cluster)
    closer = {**site, **asked}
    return {
        "job-name": config.name,
        **merged(_defaults(config.machine, cluster, closer), closer),
        **_of_the_run(config, rundir),
    }


def segment(machine: Machine) -> int | None:
    """Nodes that must share an NVLink domain: the most that divide the nodes; none: Slurm may place them freely."""
    domain = NVLINK_DOMAIN.get(machine.gpu)
    if domain is None or machine.nodes == 1:
        return None
    return max(size for size in range(1, domain + 1) if machine.nodes % size == 0)


def _of_the_run(config: RunConfig, rundir: RunDir) -> dict[str, str]:
    machine = config.machine
    return {
        "nodes": str(machine.nodes),
        "ntasks": str(machine.gpus),
        "ntasks-per-node": str(_per_node(machine)),
        "time": clock(config.limits.time_limit_s + MARGIN_S),
        "signal": f"B:USR1@{WARNING_S}",
        "export": "ALL",
        "chdir": str(rundir.path),
        "output": _output(str(rundir.path)),
        "open-mode": "append",  # a job that Slurm starts again goes on in the same file
    }


def _output(folder: str) -> str:
    """Slurm's own file in the folder. Where a backslash stands in a path Slurm fills in no number."""
    if "\\" in folder:
        return folder.replace("\\", "\\\\") + "/slurm.out"
    return folder.replace("%", "%%") + "/slurm-%j.out"


def _defaults(machine: Machine, cluster: Cluster | None, closer: Mapping[str, str]) -> dict[str, str]:
    """What follows from the machine, as far as nobody closer says otherwise."""
    if machine.gpu == "cpu":
        return {"cpus-per-task": "1"}
    found: dict[str, str] = {}
    if cluster is None and not _GPUS & closer.keys():  # a cluster's file says how its GPUs are asked for, if at all
        found["gpus-per-node"] = str(_per_node(machine))
    if machine.gpus % machine.gpus_per_node == 0:  # whole nodes are to be measured alone
        found |= {} if "oversubscribe" in closer else {"exclusive": ""}
        found |= {} if _MEMORY & closer.keys() else {"mem": "0"}  # all there is
    size = segment(machine)
    return found if size is None else found | {"segment": str(size)}


def _site(config: RunConfig, cluster: Cluster | None) -> dict[str, str]:
    """What the cluster's file asks for; fewer GPUs of a node where the run needs fewer."""
    if cluster is None:
        return {}
    own = cluster.for_target(f"{config.target}_{config.size}")
    on_cpu = config.machine.gpu == "cpu"
    options = {name: value for name, value in (own.cpu_sbatch if on_cpu else own.sbatch).items() if name != "time"}
    if on_cpu:  # a file without a section for CPU jobs has that of GPU jobs in its place
        return {name: value for name, value in options.items() if not name.startswith(("gpus", "gres"))}
    kind, colon, count = options.get("gpus-per-node", "").rpartition(":")
    if count.isdigit():
        options["gpus-per-node"] = f"{kind}{colon}{min(int(count), _per_node(config.machine))}"
    return options


def _asked(config: RunConfig, wishes: SlurmWishes) -> dict[str, str]:
    """What the user asks for; nothing may be asked for twice."""
    named = {name: str(value) for name in FIRST_CLASS if (value := getattr(wishes, name)) is not None}
    listed = _arguments(wishes.arguments)
    extra = parameters(";".join(config.limits.slurm_params))
    if extra and (named or listed):
        flags = [f"--{name}" for name in named] + (["--slurm-arg"] if listed else [])
        raise ConfigError(f"{flags[0]} and ADDITIONAL_SLURM_PARAMS both ask Slurm for something; give one of them")
    found = {**named, **listed, **extra}
    if "time" in found:
        raise ConfigError("Slurm's time limit follows from the run's own; set that one: --timeout SECONDS")
    return found


def _arguments(given: Sequence[str]) -> dict[str, str]:
    """--slurm-arg, each once."""
    found: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            raise ConfigError(f"--slurm-arg: expected key=value or a flag, without dashes before it, got {text!r}")
        if name in FIRST_CLASS:
            raise ConfigError(f"--slurm-arg {name}: has an option of its own, --{name}")
        if name in OF_THE_RUN:
            raise ConfigError(f"--slurm-arg {name}: is set by each run; leave it out")
        if name in found:
            raise ConfigError(f"--slurm-arg {name} is given twice; give it once")
        found[name] = value
    return found


def _per_node(machine: Machine) -> int:
    return min(machine.gpus, machine.gpus_per_node)


def _spelled(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"


def clock(seconds: int) -> str:
    """A time limit as Slurm counts: whole minutes, rounded up."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
