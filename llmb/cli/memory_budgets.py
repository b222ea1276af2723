"""Memory budgets of an out-of-core run beside what this machine has: said before the run, as memory that is not there
ends it only when all of it is taken."""

from collections.abc import Iterator

from llmb.config.spec import OutOfCore, RunConfig
from llmb.launch.local_machine import gpu_memory_bytes, gpu_names, host_memory_bytes
from llmb.perfmodel import hardware


def beyond_this_machine(config: RunConfig) -> Iterator[str]:
    """A line for each budget that this machine cannot give; none for a run that is meant for another machine."""
    work = config.workload
    if not isinstance(work, OutOfCore) or not _is_for_here(config):
        return
    host, device = host_memory_bytes(), gpu_memory_bytes()
    wanted = work.host_gib + (work.device_gib if config.machine.gpu == "cpu" else 0.0)  # there one memory is both
    if wanted * hardware.GIB > host:
        yield _line("host", wanted, host, "--host-gb")
    if config.machine.gpu != "cpu" and device and work.device_gib * hardware.GIB > device:
        yield _line("device", work.device_gib, device, "--device-gb")


def _is_for_here(config: RunConfig) -> bool:
    names = gpu_names()
    return config.machine.gpu == (hardware.recognise(names[0]) if names else "cpu")


def _line(which: str, wanted: float, there: int, flag: str) -> str:
    return (
        f"the plan wants {wanted:g} GiB of {which} memory, this machine has {there / hardware.GIB:.1f}; "
        f"the run will fail unless {flag} is lower"
    )
