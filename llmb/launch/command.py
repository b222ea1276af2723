"""The command that starts an engine, the variables it needs, and job.sh, which repeats the run by hand.

    engine_command(config, rundir, sys.executable) -> [python, -m, llmb.train, config.json], or another engine's
    bash job.sh                                    # the same run again, in a new folder beside the first

The engine works inside its run folder: config.json lies there, and whatever a library drops lands there.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import llmb
from llmb.errors import ConfigError, UnknownName
from llmb.launch import trtllm
from llmb.launch.rundir import CONFIG_FILE, TIMESTAMP, RunDir
from llmb.launch.secrets import is_secret
from llmb.spec import RunConfig

ENGINES = {"training": "llmb.train", "inference": "llmb.infer", "outofcore": "llmb.outofcore"}

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def engine_command(config: RunConfig, rundir: RunDir, python: str) -> list[str]:
    """What starts the run's engine, from inside its run folder."""
    check_engine(config)
    if config.engine == "trtllm":
        return trtllm.local_command(config)
    return [python, "-m", *_module(config), rundir.config.name]


def spelled_command(config: RunConfig) -> str:
    """The command as a person would type it; of another engine, its job."""
    if config.engine == "trtllm":
        return f"sbatch, with this job:\n{trtllm.slurm_job(config)}"
    return shlex.join(["python", "-m", *_module(config), CONFIG_FILE])


def check_engine(config: RunConfig) -> None:
    """A ConfigError where this installation has no engine for the run; nothing is made or started."""
    if config.engine == "trtllm":
        trtllm.check(config)
        return
    if config.engine != "native":
        raise UnknownName("engine to start here", config.engine, ["native", "trtllm"])
    kind = config.workload.kind
    if not _can_be_started(ENGINES[kind]):
        present = ", ".join(k for k, module in ENGINES.items() if _can_be_started(module)) or "none"
        raise ConfigError(f"the native engine for {kind} is not part of this version; there is one for: {present}")
    if find_spec("torch") is None:
        raise ConfigError("the native engine needs torch, which is not installed: pip install 'llmb[engine]'")


def engine_environment(config: RunConfig, environ: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The variables to set on top of `environ`: those the user wants, with their real values, and the engine's own."""
    _check(wanted)
    given = {**environ, **wanted}
    defaults = {"OMP_NUM_THREADS": str(max(1, _cores() // config.machine.gpus))}  # else each rank takes every core
    if config.profile.nccl_trace:
        defaults |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}  # every collective call, in the log
    settings = {**wanted, "PYTHONUNBUFFERED": "1"}
    settings |= {name: value for name, value in defaults.items() if name not in given}
    paths = [os.path.abspath(path) for path in given.get("PYTHONPATH", "").split(os.pathsep) if path]
    source = str(Path(llmb.__file__).parent.parent)
    if Path(source).name not in ("site-packages", "dist-packages") and source not in paths:
        paths.insert(0, source)  # run from a checkout, which the engine would not find from its run folder
    if paths:
        settings["PYTHONPATH"] = os.pathsep.join(paths)
    return settings


def job_script(command: Sequence[str], environment: Mapping[str, str], rundir: RunDir) -> str:
    """The text of job.sh. Secrets are left out: whoever runs it has them in the environment, or not at all."""
    _check(environment)
    secret = [name for name, value in environment.items() if is_secret(name, value)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items() if name not in secret]
    name = shlex.quote(rundir.name)
    folder = f'"$again"/{name}'
    lines = [
        "#!/usr/bin/env bash",
        "# Repeats this run in a new folder beside it.",
        *(f"# Secret, taken from your environment: {name}" for name in secret),
        "set -euo pipefail",
        'here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)',
        f'again="${{here%/*/*}}"/{name}_"$(date +{TIMESTAMP})"',
        f'mkdir -- "$again" {folder}',
        f'cp -- "$here/{rundir.config.name}" {folder}',
        f"cd -- {folder}",
        'echo "repeating in $PWD"',
        *exports,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _module(config: RunConfig) -> list[str]:
    """The engine's module; above one GPU torchrun starts a process for each, on every node."""
    machine, module = config.machine, ENGINES[config.workload.kind]
    if machine.gpus == 1:
        return [module]
    per_node = str(min(machine.gpus, machine.gpus_per_node))
    nodes = ["--standalone"] if machine.nodes == 1 else ["--nnodes", str(machine.nodes)]
    return ["torch.distributed.run", *nodes, "--nproc-per-node", per_node, "-m", module]


def _can_be_started(module: str) -> bool:
    """Whether `python -m module` would find something; nothing is imported to find out, as that would load torch."""
    spec = find_spec(module)
    if spec is None:
        return False
    folders = spec.submodule_search_locations
    return folders is None or any(Path(folder, "__main__.py").is_file() for folder in folders)


def _check(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name an environment variable; use letters, digits and '_'")
        if "\0" in value:
            raise ConfigError(f"environment variable {name} holds a zero byte, which no process can be given")


def _cores() -> int:
    """Cores this process may use: fewer than the machine has inside a container or a job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
