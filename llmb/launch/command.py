"""The command that starts an engine, its environment variables, and job.sh, which repeats the run by hand.

    engine_command(config, run_folder, sys.executable) -> [python, -m, llmb.train, config.json], or another engine's
    build_launch_spec(config, run_folder, sys.executable) -> the same for a cluster: the command of each task
    bash job.sh                                    # the same run again, in a new folder beside the first

The working directory of the engine is its run folder, with config.json and whatever files libraries write.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import llmb
from llmb.config.spec import NSIGHT_VARIABLE, RunConfig
from llmb.errors import ConfigError, UnknownName
from llmb.launch.engines import megatron_bridge, nsys_command, trtllm
from llmb.launch.engines.launch_spec import LaunchSpec
from llmb.launch.run_folder import CONFIG_FILE, TIMESTAMP, RunFolder
from llmb.launch.secrets import is_secret

ENGINES = {"training": "llmb.train", "inference": "llmb.serve", "outofcore": "llmb.offload"}

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def engine_command(
    config: RunConfig, run_folder: RunFolder, python: str, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the command that starts the run's engine on this machine, from inside its run folder."""
    check_engine(config, environ)
    nsys = [] if not nsys_command.is_used(config) else nsys_command.wrap([], config, run_folder.job_id)
    if config.engine == "trtllm":
        return [*nsys, *trtllm.local_command(config)]
    if config.engine == "megatron_bridge":
        return _torchrun(config, "python3", [*nsys, "python3"] if nsys else [], megatron_bridge.script(config, environ))
    if config.launch_machine.gpus == 1 or config.engine == "openai":
        return [*nsys, python, *_module(config)]
    return _torchrun(config, python, [*nsys, python] if nsys else [], _module(config))


def build_launch_spec(
    config: RunConfig, run_folder: RunFolder, python: str, environ: Mapping[str, str] = os.environ
) -> LaunchSpec:
    """Return the launch spec of the run on a cluster. `python`: of the native engine; a container has its own."""
    if config.engine == "trtllm":
        spec = trtllm.launch_spec(config, environ)
    elif config.engine == "megatron_bridge":
        spec = megatron_bridge.launch_spec(config, environ)
    else:
        source = _checkout()
        spec = LaunchSpec(command=(python, *_module(config)), folders=(source,) if source else ())
    if not nsys_command.is_used(config):
        return spec
    return replace(spec, command=tuple(nsys_command.wrap(spec.command, config, run_folder.job_id)))


def format_engine_command(config: RunConfig, environ: Mapping[str, str] = os.environ) -> str:
    """Return the command as typed in a shell; another engine's as each rank runs it, trtllm-bench's as a script."""
    if config.engine == "trtllm":
        return trtllm.script(config)
    if config.engine == "megatron_bridge":
        return shlex.join(["python3", *megatron_bridge.script(config, environ)]) + "\n"
    single = config.launch_machine.gpus == 1 or config.engine == "openai"
    return shlex.join(["python", *_module(config)] if single else _torchrun(config, "python", [], _module(config)))


def check_engine(
    config: RunConfig, environ: Mapping[str, str] = os.environ, local: bool = True, in_container: bool = False
) -> None:
    """Raise a ConfigError where the engine cannot run this configuration; nothing is created or started.

    `local`: the run starts on this machine, so its requirements must be installed; a container is not checked.
    """
    if local:
        nsys_command.check(config)
    if config.engine == "trtllm":
        trtllm.check(config, local)
    elif config.engine == "megatron_bridge":
        megatron_bridge.check(config, environ, in_container)
    elif config.engine == "native":
        _check_native(config, in_container)
    elif config.engine != "openai":  # of that the server is elsewhere
        raise UnknownName("engine to start here", config.engine, ["native", "trtllm", "megatron_bridge", "openai"])


def _check_native(config: RunConfig, in_container: bool) -> None:
    kind = config.workload.kind
    if not _is_runnable(ENGINES[kind]):
        present = ", ".join(k for k, module in ENGINES.items() if _is_runnable(module)) or "none"
        raise ConfigError(f"the native engine for {kind} is not part of this version; there is one for: {present}")
    if not in_container and find_spec("torch") is None:
        raise ConfigError(f"the native engine needs torch, which is not installed: {engine_install_command()}")


def engine_install_command() -> str:
    """Return the command that installs what the native engine needs beside this llmb, wherever that came from.

    `pip install 'llmb[engine]'` would search llmb itself on the package index.
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow to import and rarely needed

    try:
        requirements = [text.partition(";") for text in requires("llmb") or ()]
    except PackageNotFoundError:  # run from a checkout that is not installed
        requirements = []
    engine = [name.strip() for name, _, marker in requirements if re.search(r"extra\s*==\s*.engine.", marker)]
    return shlex.join([sys.executable, "-m", "pip", "install", *(engine or ["torch"])])


def engine_environment(config: RunConfig, environ: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set on top of `environ`: the user's `overrides`, secrets included, and the engine's."""
    _check_variables(overrides)
    explicit = {**environ, **overrides}
    machine = config.launch_machine
    local_ranks = 1 if config.engine == "openai" else min(machine.gpus, machine.gpus_per_node)
    defaults = {"OMP_NUM_THREADS": str(max(1, _cores() // local_ranks))}  # else each rank uses every core
    if config.profile.nccl_trace:
        defaults |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}  # every collective call, in the log
    defaults |= _engine_variables(config, explicit)
    settings = {**overrides, "PYTHONUNBUFFERED": "1"}
    settings |= {name: value for name, value in defaults.items() if name not in explicit}
    if nsys_command.is_used(config):
        settings[NSIGHT_VARIABLE] = "1"
    if _has_package(overrides.get("PYTHONPATH", "")):  # ranks of another checkout
        return settings
    if path := python_path(explicit.get("PYTHONPATH", ""), defaults.get("PYTHONPATH", "")):
        settings["PYTHONPATH"] = path
    return settings


def _has_package(path: str) -> bool:
    """Return whether the first folder of a PYTHONPATH is a checkout of llmb."""
    return bool(path) and (Path(path.split(os.pathsep)[0]) / "llmb" / "__init__.py").exists()


def python_path(*python_paths: str) -> str:
    """Join PYTHONPATHs, and add this checkout so that a process finds it wherever it starts."""
    folders = [folder for path in python_paths for folder in path.split(os.pathsep) if folder]
    paths = list(dict.fromkeys(map(os.path.abspath, folders)))
    source = _checkout()
    if source and source not in paths:
        paths.insert(0, source)
    return os.pathsep.join(paths)


def job_script(command: Sequence[str], environment: Mapping[str, str], run_folder: RunFolder) -> str:
    """Return the text of job.sh. Secrets are left out: they come from the environment of whoever runs it."""
    _check_variables(environment)
    secret = [name for name, value in environment.items() if is_secret(name, value)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items() if name not in secret]
    name = shlex.quote(run_folder.name)
    folder = f'"$again"/{name}'
    lines = [
        "#!/usr/bin/env bash",
        "# Repeats this run in a new folder beside it.",
        *(f"# Secret, taken from your environment: {name}" for name in secret),
        "set -euo pipefail",
        'here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)',
        f'again="${{here%/*/*}}"/{name}_"$(date +{TIMESTAMP})"',
        f'mkdir -- "$again" {folder}',
        f'cp -- "$here/{run_folder.config.name}" {folder}',
        f"cd -- {folder}",
        'echo "repeating in $PWD"',
        *exports,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _checkout() -> str | None:
    """Return the folder that contains this package; None where it is installed in site-packages."""
    folder = Path(llmb.__file__).parent.parent
    return None if folder.name in ("site-packages", "dist-packages") else str(folder)


def _engine_variables(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    if config.engine == "trtllm":
        return trtllm.environment(config)
    return megatron_bridge.environment(config, environ) if config.engine == "megatron_bridge" else {}


def _module(config: RunConfig) -> list[str]:
    module = "llmb.loadgen" if config.engine == "openai" else ENGINES[config.workload.kind]
    return ["-m", module, CONFIG_FILE]


def _torchrun(config: RunConfig, python: str, program: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command, one process per GPU; `program`: what runs the arguments, if not Python itself."""
    machine = config.machine
    per_node = str(min(machine.gpus, machine.gpus_per_node))
    nodes = ["--standalone"] if machine.nodes == 1 else ["--nnodes", str(machine.nodes)]
    start = [python, "-m", "torch.distributed.run", *nodes, "--nproc-per-node", per_node]
    return [*start, "--no-python", *program, *arguments] if program else [*start, *arguments]


def _is_runnable(module: str) -> bool:
    """Return whether `python -m module` works; nothing is imported to find out, as that would load torch."""
    spec = find_spec(module)
    if spec is None:
        return False
    folders = spec.submodule_search_locations
    return folders is None or any(Path(folder, "__main__.py").is_file() for folder in folders)


def _check_variables(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name an environment variable; use letters, digits and '_'")
        if "\0" in value:
            raise ConfigError(f"environment variable {name} holds a zero byte, which no environment variable can hold")


def _cores() -> int:
    """Return the cores this process may use: inside a container or a job, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
