"""job.sh of a Slurm run: its #SBATCH options, and the one process it starts.

    slurm_script(config, run_folder, cluster, overrides, [python, -m, llmb.cli.job_runner, ...], environment) -> text
    sbatch_arguments(config, run_folder, cluster, overrides)    options that job.sh cannot hold

Pure: the same request gives the same text. Precedence of an option: the command line, then the cluster's file, then the
defaults of the run. Options that define the run (nodes, ranks, time, signal) cannot be overridden.

#SBATCH lines have no reliable quoting, so a value with special characters is passed to sbatch as an argument instead; a
comment of job.sh holds the command with these arguments. Secrets are in neither: they are taken from the submitter's
environment.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmb.config.spec import Machine, RunConfig
from llmb.errors import ConfigError
from llmb.launch.run_folder import RunFolder
from llmb.launch.secrets import is_secret
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.sbatch_options import RESERVED_OPTIONS, complete_option, merge_layers, parse_additional_params

TIME_LIMIT_MARGIN_S = 180  # beyond the run's own limit: it should end by that one, and write its result
SIGNAL_LEAD_S = 60  # from the signal to Slurm's limit; Slurm may send it up to a minute early
NVLINK_DOMAIN = {"gb200": 18, "gb300": 18}  # nodes per NVLink domain
OPTIONS_WITH_FLAGS = ("nice", "nodelist", "exclude", "reservation", "segment")  # of llmb-run submit

_SAFE_VALUE = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]*")
_MEMORY_OPTIONS = {"mem", "mem-per-cpu", "mem-per-gpu"}
_GPU_OPTIONS = {"gres", "gpus", "gpus-per-task", "gpus-per-socket"}


@dataclass(frozen=True, kw_only=True)
class SbatchOverrides:
    """sbatch options from the command line."""

    nice: int | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    segment: int | None = None
    arguments: tuple[str, ...] = ()  # key=value or a bare flag, as sbatch names them


def with_gpus_per_node(config: RunConfig, gpus_per_node: int | None) -> RunConfig:
    """Return the run on nodes of this many GPUs, or of as many as its GPU type has; CPU ranks are spread alike."""
    if gpus_per_node is None:
        return config
    return replace(config, machine=replace(config.machine, gpus_per_node=gpus_per_node))


def slurm_script(
    config: RunConfig,
    run_folder: RunFolder,
    cluster: Cluster | None,
    overrides: SbatchOverrides,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> str:
    """Return the text of job.sh. `command`: what the job runs; `environment`: variables to export."""
    options = job_options(config, run_folder, cluster, overrides)
    lines_of_options = {name: value for name, value in options.items() if _SAFE_VALUE.fullmatch(value)}
    by_hand = ["sbatch", *sbatch_arguments(config, run_folder, cluster, overrides), run_folder.job_script.name]
    secret = [name for name, value in environment.items() if is_secret(name, value)]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {_format_option(name, value)}" for name, value in lines_of_options.items()),
        f"# What llmb-run submit sends to Slurm; by hand, to run it again: {' '.join(map(_shell_word, by_hand))}",
        *(f"# Secret, taken from your environment: {name}" for name in secret),
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items() if name not in secret),
        f"exec {shlex.join(command)}",  # replaces the shell, so that it gets Slurm's signals
    ]
    return "\n".join(lines) + "\n"


def sbatch_arguments(
    config: RunConfig, run_folder: RunFolder, cluster: Cluster | None, overrides: SbatchOverrides
) -> list[str]:
    """Return the options that job.sh cannot hold."""
    options = job_options(config, run_folder, cluster, overrides)
    return [_format_option(name, value) for name, value in options.items() if not _SAFE_VALUE.fullmatch(value)]


def job_options(
    config: RunConfig, run_folder: RunFolder, cluster: Cluster | None, overrides: SbatchOverrides
) -> dict[str, str]:
    """Return every option of the job by its long name; "" is a bare flag."""
    explicit = {**_cluster_options(config, cluster), **_user_options(config, overrides)}
    return {
        "job-name": config.name,
        **merge_layers(_default_options(config.machine, cluster, explicit), explicit),
        **_run_options(config, run_folder),
    }


def segment(machine: Machine) -> int | None:
    """Return --segment, nodes that must share an NVLink domain: the largest divisor that fits; None: no constraint."""
    domain = NVLINK_DOMAIN.get(machine.gpu)
    if domain is None or machine.nodes == 1:
        return None
    return max(size for size in range(1, domain + 1) if machine.nodes % size == 0)


def _run_options(config: RunConfig, run_folder: RunFolder) -> dict[str, str]:
    machine = config.machine
    return {
        "nodes": str(machine.nodes),
        "ntasks": str(machine.gpus),
        "ntasks-per-node": str(_ranks_per_node(machine)),
        "time": format_time_limit(config.limits.time_limit_s + TIME_LIMIT_MARGIN_S),
        "signal": f"B:USR1@{SIGNAL_LEAD_S}",
        "export": "ALL",
        "chdir": str(run_folder.path),
        "output": _output(str(run_folder.path)),
        "open-mode": "append",  # a job that Slurm requeues continues in the same file
    }


def _output(folder: str) -> str:
    """Return --output. Slurm expands no %j in a path with a backslash."""
    if "\\" in folder:
        return folder.replace("\\", "\\\\") + "/slurm.out"
    return folder.replace("%", "%%") + "/slurm-%j.out"


def _default_options(machine: Machine, cluster: Cluster | None, explicit: Mapping[str, str]) -> dict[str, str]:
    """Return the options that follow from the machine, where nothing explicit conflicts."""
    if machine.gpu == "cpu":
        return {"cpus-per-task": "1"}
    options: dict[str, str] = {}
    if cluster is None and not _GPU_OPTIONS & explicit.keys():  # a cluster's file says how to request GPUs, if at all
        options["gpus-per-node"] = str(_ranks_per_node(machine))
    if machine.gpus % machine.gpus_per_node == 0:  # whole nodes are not shared with other jobs
        options |= {} if "oversubscribe" in explicit else {"exclusive": ""}
        options |= {} if _MEMORY_OPTIONS & explicit.keys() else {"mem": "0"}  # all memory
    size = segment(machine)
    return options if size is None else options | {"segment": str(size)}


def _cluster_options(config: RunConfig, cluster: Cluster | None) -> dict[str, str]:
    """Return the options of the cluster's file, with fewer GPUs per node where the run needs fewer."""
    if cluster is None:
        return {}
    settings = cluster.for_target(f"{config.target}_{config.size}")
    on_cpu = config.machine.gpu == "cpu"
    options = {
        name: value for name, value in (settings.cpu_sbatch if on_cpu else settings.sbatch).items() if name != "time"
    }
    if on_cpu:  # without a cpu section, cpu_sbatch is that of GPU jobs
        return {name: value for name, value in options.items() if not name.startswith(("gpus", "gres"))}
    kind, colon, count = options.get("gpus-per-node", "").rpartition(":")
    if count.isdigit():
        options["gpus-per-node"] = f"{kind}{colon}{min(int(count), _ranks_per_node(config.machine))}"
    return options


def _user_options(config: RunConfig, overrides: SbatchOverrides) -> dict[str, str]:
    """Return the options of the command line or of ADDITIONAL_SLURM_PARAMS, which exclude each other."""
    named = {name: str(value) for name in OPTIONS_WITH_FLAGS if (value := getattr(overrides, name)) is not None}
    listed = _parse_slurm_args(overrides.arguments)
    extra = parse_additional_params(";".join(config.limits.slurm_params))
    if extra and (named or listed):
        flags = [f"--{name}" for name in named] + (["--slurm-arg"] if listed else [])
        raise ConfigError(f"{flags[0]} and ADDITIONAL_SLURM_PARAMS both set Slurm options; use one of them")
    options = {**named, **listed, **extra}
    if "time" in options:
        raise ConfigError("Slurm's time limit follows from the run's own; set that one: --timeout SECONDS")
    return options


def _parse_slurm_args(arguments: Sequence[str]) -> dict[str, str]:
    """Parse --slurm-arg; each option may be given once."""
    options: dict[str, str] = {}
    for text in arguments:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            raise ConfigError(f"--slurm-arg: expected key=value or a flag, without dashes before it, got {text!r}")
        name = complete_option(name, "--slurm-arg")
        if name in OPTIONS_WITH_FLAGS:
            raise ConfigError(f"--slurm-arg {name}: has an option of its own, --{name}")
        if name in RESERVED_OPTIONS:
            raise ConfigError(f"--slurm-arg {name}: is set by each run; leave it out")
        if name in options:
            raise ConfigError(f"--slurm-arg {name} is given twice; give it once")
        options[name] = value
    return options


def _ranks_per_node(machine: Machine) -> int:
    return min(machine.gpus, machine.gpus_per_node)


def _format_option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"


def _shell_word(text: str) -> str:
    """Quote a word for bash, on one line whatever it holds."""
    return (
        shlex.quote(text)
        if text.isprintable()
        else "$'" + text.encode("unicode_escape").decode().replace("'", r"\'") + "'"
    )


def format_time_limit(seconds: int) -> str:
    """Format a time limit for Slurm: whole minutes, rounded up."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
