"""Facts of a device that decide how fast it is, recorded with every run: a result says `power limit 400 W` by itself.

device_facts("GPU-6f1f...")     of one GPU, by nvidia-smi: some tenths of a second
device_facts(None)              of a CPU
"""

from dataclasses import dataclass, fields
from typing import Any

from llmb.config.serialization import build
from llmb.errors import ConfigError
from llmb.formats.cpu_governor import cpu_governors
from llmb.formats.nvidia_smi import GpuStatus, query_gpus


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device, as it was when the run started. Null: not reported."""

    driver: str | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    sm_clock_max_mhz: int | None = None
    sm_clock_applied_mhz: int | None = None  # applications clock
    sm_clock_default_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttling: tuple[str, ...] = ()  # reasons for lower clocks, other than idleness
    temperature_c: float | None = None
    ecc: bool | None = None
    pcie_gen: int | None = None  # highest of GPU and slot
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    governor: str | None = None  # of the host's CPUs


def device_facts(uuid: str | None) -> DeviceFacts:
    """Return the facts of the GPU with this UUID; without one, or without nvidia-smi, only those of the host."""
    gpus = query_gpus(uuid, links=False)[0] if uuid is not None else []
    return gpu_facts(gpus[0]) if len(gpus) == 1 else DeviceFacts(governor=_governor())


def gpu_facts(gpu: GpuStatus) -> DeviceFacts:
    """Return the facts of a GPU that nvidia-smi was asked about."""
    return DeviceFacts(
        driver=gpu.driver,
        power_limit_w=gpu.power_limit_w,
        power_default_w=gpu.power_default_w,
        sm_clock_max_mhz=gpu.sm_clock_max_mhz,
        sm_clock_applied_mhz=gpu.sm_clock_applied_mhz,
        sm_clock_default_mhz=gpu.sm_clock_default_mhz,
        memory_clock_max_mhz=gpu.memory_clock_max_mhz,
        throttling=gpu.throttling,
        temperature_c=gpu.temperature_c,
        ecc=gpu.ecc,
        pcie_gen=gpu.pcie_gen_max,
        pcie_width=gpu.pcie_width,
        pcie_width_max=gpu.pcie_width_max,
        governor=_governor(),
    )


def _governor() -> str | None:
    return ", ".join(cpu_governors()) or None


def recorded_facts(data: Any) -> DeviceFacts:
    """Return the facts that an event holds; fields of another version are ignored, damaged ones say nothing."""
    names = {field.name for field in fields(DeviceFacts)}
    try:
        return build(DeviceFacts, {name: value for name, value in dict(data or {}).items() if name in names})
    except (ConfigError, TypeError, ValueError):
        return DeviceFacts()


def power_limit_text(facts: DeviceFacts) -> str | None:
    """Return the power limit beside the part's default; None where they are equal, or not known."""
    limit, default = facts.power_limit_w, facts.power_default_w
    if limit is None or default is None or limit == default:
        return None
    return f"power limit {limit:.0f} W, the part's default is {default:.0f} W"
