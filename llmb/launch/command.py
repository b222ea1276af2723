"""The command that starts an engine, the variables it needs, and job.sh, which repeats the run by hand.

    engine_command(config, rundir, sys.executable) -> [python, -m, llmb.train, config.json], or another engine's
    engine_order(config, rundir, sys.executable)   -> the same for a cluster: what each task runs
    bash job.sh                                    # the same run again, in a new folder beside the first

The engine works inside its run folder: config.json lies there, and whatever a library drops lands there.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import llmb
from llmb.config.spec import NSIGHT_VARIABLE, RunConfig
from llmb.errors import ConfigError, UnknownName
from llmb.launch.engines import megatron_bridge, nsys_command, trtllm
from llmb.launch.engines.launch_spec import EngineOrder
from llmb.launch.run_folder import CONFIG_FILE, TIMESTAMP, RunDir
from llmb.launch.secrets import is_secret

ENGINES = {"training": "llmb.train", "inference": "llmb.serve", "outofcore": "llmb.offload"}

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def engine_command(
    config: RunConfig, rundir: RunDir, python: str, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """What starts the run's engine on this machine, from inside its run folder."""
    check_engine(config, environ)
    nsys = [] if not nsys_command.used(config) else nsys_command.wrapped([], config, rundir.job_id)
    if config.engine == "trtllm":
        return [*nsys, *trtllm.local_command(config)]
    if config.engine == "megatron_bridge":
        return _torchrun(config, "python3", [*nsys, "python3"] if nsys else [], megatron_bridge.script(config, environ))
    if config.machine.gpus == 1:
        return [*nsys, python, *_module(config)]
    return _torchrun(config, python, [*nsys, python] if nsys else [], _module(config))


def engine_order(
    config: RunConfig, rundir: RunDir, python: str, environ: Mapping[str, str] = os.environ
) -> EngineOrder:
    """What a cluster starts for the run, task by task. `python`: the native engine's; a container has its own."""
    if config.engine == "trtllm":
        order = trtllm.order(config, environ)
    elif config.engine == "megatron_bridge":
        order = megatron_bridge.order(config, environ)
    else:
        source = _checkout()
        order = EngineOrder(command=(python, *_module(config)), folders=(source,) if source else ())
    if not nsys_command.used(config):
        return order
    return replace(order, command=tuple(nsys_command.wrapped(order.command, config, rundir.job_id)))


def spelled_command(config: RunConfig, environ: Mapping[str, str] = os.environ) -> str:
    """The command as a person would type it; another engine's as each rank runs it, trtllm-bench's as a script."""
    if config.engine == "trtllm":
        return trtllm.script(config)
    if config.engine == "megatron_bridge":
        return shlex.join(["python3", *megatron_bridge.script(config, environ)]) + "\n"
    alone = config.machine.gpus == 1
    return shlex.join(["python", *_module(config)] if alone else _torchrun(config, "python", [], _module(config)))


def check_engine(
    config: RunConfig, environ: Mapping[str, str] = os.environ, here: bool = True, in_container: bool = False
) -> None:
    """A ConfigError where there is no engine for the run; nothing is made or started.

    `here`: it is to be started on this machine, so what it needs must be on it; a container is not looked into.
    """
    if here:
        nsys_command.check(config)
    if config.engine == "trtllm":
        trtllm.check(config, here)
    elif config.engine == "megatron_bridge":
        megatron_bridge.check(config, environ, in_container)
    elif config.engine == "native":
        _check_native(config, in_container)
    else:
        raise UnknownName("engine to start here", config.engine, ["native", "trtllm", "megatron_bridge"])


def _check_native(config: RunConfig, in_container: bool) -> None:
    kind = config.workload.kind
    if not _can_be_started(ENGINES[kind]):
        present = ", ".join(k for k, module in ENGINES.items() if _can_be_started(module)) or "none"
        raise ConfigError(f"the native engine for {kind} is not part of this version; there is one for: {present}")
    if not in_container and find_spec("torch") is None:
        raise ConfigError("the native engine needs torch, which is not installed: pip install 'llmb[engine]'")


def engine_environment(config: RunConfig, environ: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The variables to set on top of `environ`: those the user wants, with their real values, and the engine's own."""
    _check(wanted)
    given = {**environ, **wanted}
    ranks_here = min(config.machine.gpus, config.machine.gpus_per_node)
    defaults = {"OMP_NUM_THREADS": str(max(1, _cores() // ranks_here))}  # else each rank takes every core
    if config.profile.nccl_trace:
        defaults |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}  # every collective call, in the log
    defaults |= _own_environment(config, given)
    settings = {**wanted, "PYTHONUNBUFFERED": "1"}
    settings |= {name: value for name, value in defaults.items() if name not in given}
    if nsys_command.used(config):
        settings[NSIGHT_VARIABLE] = "1"
    if path := python_path(given.get("PYTHONPATH", ""), defaults.get("PYTHONPATH", "")):
        settings["PYTHONPATH"] = path
    return settings


def python_path(*known: str) -> str:
    """A PYTHONPATH of those that are known, by which a process finds this checkout wherever it starts."""
    folders = [folder for one in known for folder in one.split(os.pathsep) if folder]
    paths = list(dict.fromkeys(map(os.path.abspath, folders)))
    source = _checkout()
    if source and source not in paths:
        paths.insert(0, source)
    return os.pathsep.join(paths)


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


def _checkout() -> str | None:
    """The folder this package lies in, where that is no place in which Python looks by itself."""
    folder = Path(llmb.__file__).parent.parent
    return None if folder.name in ("site-packages", "dist-packages") else str(folder)


def _own_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    if config.engine == "trtllm":
        return trtllm.environment(config)
    return megatron_bridge.environment(config, environ) if config.engine == "megatron_bridge" else {}


def _module(config: RunConfig) -> list[str]:
    return ["-m", ENGINES[config.workload.kind], CONFIG_FILE]


def _torchrun(config: RunConfig, python: str, program: Sequence[str], words: Sequence[str]) -> list[str]:
    """A process for each GPU; `program`: what runs the words, where that is not Python itself."""
    machine = config.machine
    per_node = str(min(machine.gpus, machine.gpus_per_node))
    nodes = ["--standalone"] if machine.nodes == 1 else ["--nnodes", str(machine.nodes)]
    start = [python, "-m", "torch.distributed.run", *nodes, "--nproc-per-node", per_node]
    return [*start, "--no-python", *program, *words] if program else [*start, *words]


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
