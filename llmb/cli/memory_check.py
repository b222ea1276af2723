"""Check of runs against the memory of their GPUs and hosts, before anything is created or submitted.

Missing memory would end a run only after all of it is taken, and on a machine without GPUs everything else with it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from llmb.config.native.outofcore_support import disk_misfit
from llmb.config.run_list import out_of_core_target
from llmb.config.spec import OutOfCore, RunConfig, Training
from llmb.errors import ConfigError
from llmb.launch.local_machine import available_memory_bytes, gpu_memory_bytes, gpu_names
from llmb.perfmodel import hardware, memory_fit

if TYPE_CHECKING:
    from llmb.config.recipe import Recipe

OVERRIDE = "--force runs it anyway"


def check_memory(
    configs: Sequence[RunConfig], recipes: Mapping[str, "Recipe"], *, local: bool, force: bool = False
) -> None:
    """Refuse runs that do not fit, unless forced; `local`: they are for this machine."""
    lines = [(config, line) for config in configs for line in misfits(config, recipes, local=local)]
    for line in dict.fromkeys(filter(None, map(_unchecked, configs))):
        print(f"note: {line}", file=sys.stderr)
    if force:
        warn(line for _, line in lines)
    elif len(configs) == 1 and lines:
        raise ConfigError(f"{lines[0][1]}; {OVERRIDE}")
    elif lines:
        for config, line in lines:
            print(f"ERROR: {config.name}: {line}", file=sys.stderr)
        refused = len({config.name for config, _ in lines})
        raise ConfigError(f"{refused} of {len(configs)} runs do not fit into memory; nothing was started")


def check_node_memory(config: RunConfig, *, force: bool) -> None:
    """Refuse a run whose ranks need more host memory than this node of its allocation has, unless forced."""
    ranks = min(config.launch_machine.gpus, config.launch_machine.gpus_per_node)
    line = memory_fit.host_misfit(config, ranks, available_memory_bytes())
    if line is not None and not force:
        raise ConfigError(f"{line}; {OVERRIDE}")


def warn(lines: Iterator[str]) -> None:
    """Print each line as a warning."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr, flush=True)


def misfits(config: RunConfig, recipes: Mapping[str, "Recipe"], *, local: bool) -> Iterator[str]:
    """Yield a line for device and host memory and disk that a run exceeds; of the last two only for this machine."""
    line = memory_fit.misfit(config)
    if line is not None:
        target = out_of_core_target(config.size, recipes) if _is_on_one_gpu(config) else None
        yield line if target is None else f"{line}; out of core it runs: {target}"
    elif local and _is_for_here(config):
        line = memory_fit.host_misfit(config, config.launch_machine.gpus, available_memory_bytes())
        if line is not None:
            yield line
        work = config.workload
        if isinstance(work, OutOfCore) and work.prediction is not None and work.prediction.disk_bytes:
            line = disk_misfit(work.disk_path, sum(work.prediction.disk_bytes.values()))
            if line is not None:
                yield line


def _is_on_one_gpu(config: RunConfig) -> bool:
    return isinstance(config.workload, Training) and config.machine.gpus == 1 and config.machine.gpu != "cpu"


def _unchecked(config: RunConfig) -> str | None:
    """Return that the memory of a run's GPU is unknown, if it is."""
    if config.launch_machine.gpu == "cpu" or hardware.memory_bytes(config.launch_machine) is not None:
        return None
    return f"the memory of {config.launch_machine.gpu} is not known, so whether the run fits is not checked"


def _is_for_here(config: RunConfig) -> bool:
    names = gpu_names()
    return config.launch_machine.gpu == (hardware.gpu_key(names[0], gpu_memory_bytes()) if names else "cpu")
