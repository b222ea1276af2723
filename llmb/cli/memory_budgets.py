"""Check of an out-of-core run's memory budgets against this machine, before the run: missing memory would end it only
after all of it is taken."""

from collections.abc import Iterator

from llmb.config.spec import OutOfCore, RunConfig
from llmb.launch.local_machine import gpu_memory_bytes, gpu_names, host_memory_bytes
from llmb.perfmodel import hardware


def beyond_this_machine(config: RunConfig) -> Iterator[str]:
    """Yield a line for each budget that exceeds this machine's memory; nothing for runs on another machine."""
    work = config.workload
    if not isinstance(work, OutOfCore) or not _is_for_here(config):
        return
    host, device = host_memory_bytes(), gpu_memory_bytes()
    required = work.host_gib + (
        work.device_gib if config.machine.gpu == "cpu" else 0.0
    )  # the CPU's memory serves as both
    if required * hardware.GIB > host:
        yield _line("host", required, host, "--host-gb")
    if config.machine.gpu != "cpu" and device and work.device_gib * hardware.GIB > device:
        yield _line("device", work.device_gib, device, "--device-gb")


def _is_for_here(config: RunConfig) -> bool:
    names = gpu_names()
    return config.machine.gpu == (hardware.identify_gpu(names[0]) if names else "cpu")


def _line(kind: str, required: float, available: int, flag: str) -> str:
    return (
        f"the plan needs {required:g} GiB of {kind} memory, this machine has {available / hardware.GIB:.1f}; "
        f"the run will fail unless {flag} is lower"
    )
