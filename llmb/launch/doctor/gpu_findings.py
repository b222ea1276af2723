"""Findings about GPUs: are they all there, at full power and clocks, with healthy memory and links, and alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from llmb.formats.nvidia_smi import GpuProcess, GpuStatus
from llmb.launch.doctor.finding import Finding, ok, problem, warning
from llmb.launch.doctor.machine_facts import MachineFacts

T = TypeVar("T")
GIB = 2**30
PERSISTENCE_REMEDY = "sudo nvidia-smi -pm 1; without it the driver starts anew for each process, with default settings"
# Reason for lower clocks -> what to do. Not here: sw_power_cap, which every GPU under load shows.
SLOWDOWNS = {
    "hw_slowdown": "the board slows itself down: look for heat, power supply and `dmesg | grep -i xid`",
    "hw_thermal_slowdown": "too hot: check fans, air flow and the temperature of the room",
    "sw_thermal_slowdown": "too hot: check fans, air flow and the temperature of the room",
    "hw_power_brake_slowdown": "the power supply asks for less: check PSUs, cables and the rack's power budget",
    "sync_boost": "clocks follow the slowest GPU of a group: nvidia-smi boost-slider, or DCGM's sync boost, sets it",
    "applications_clocks_setting": "clocks are set by hand: sudo nvidia-smi -rac, and -rgc, return to the default",
}
USED_BYTES = 1 * GIB  # of a GPU that no process seems to use; a driver alone takes less
MANY_REPLAYS = 100  # PCIe packets sent again since the driver was loaded


def gpu_findings(facts: MachineFacts) -> Iterator[Finding]:
    """Yield one or more lines for each thing to look at."""
    yield from _presence(facts)
    gpus = facts.gpus
    if not gpus:
        return
    yield from _driver(facts)
    yield from _power(gpus)
    yield from _clocks(gpus)
    yield from _throttling(gpus)
    yield from _memory_health(gpus)
    yield from _pcie(gpus)
    yield from _links(gpus)
    yield from _modes(gpus)
    yield from _processes(gpus)


def _presence(facts: MachineFacts) -> Iterator[Finding]:
    on_bus, listed = len(facts.host.gpu_numa or {}), len(facts.gpus)
    if not listed and (on_bus or facts.gpu_error):
        reason = facts.gpu_error or "nvidia-smi is not installed"
        remedy = "install or load the NVIDIA driver (sudo modprobe nvidia); in a container start it with --gpus all"
        seen = f"{on_bus} NVIDIA GPUs on the PCI bus, but " if on_bus else ""
        yield problem("GPUs", f"{seen}{reason}", remedy)
        return
    if not listed:
        yield ok("GPUs", "none: runs here use the CPU, as proxies; speeds of CPUs are not this tool's purpose")
        return
    names = {gpu.name or "unknown" for gpu in facts.gpus}
    sizes = {round((gpu.memory_bytes or 0) / GIB, 1) for gpu in facts.gpus}
    text = f"{listed} x {', '.join(sorted(names))}, {' and '.join(f'{size:g}' for size in sorted(sizes))} GiB"
    if facts.gpu_error:
        yield problem(
            "GPUs", f"{text}; {facts.gpu_error}", "a GPU does not respond: reset it or the machine, see dmesg"
        )
    elif listed < on_bus:
        remedy = "inside a container or a job that is intended; else look for Xid 79 in dmesg and reset the machine"
        yield warning("GPUs", f"{text}; {on_bus} are on the PCI bus", remedy)
    elif len(names) > 1 or len(sizes) > 1:
        yield warning("GPUs", text, "GPUs differ: choose equal ones with CUDA_VISIBLE_DEVICES")
    else:
        yield ok("GPUs", text)


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    gpu, built_for = facts.gpus[0], facts.software.torch_cuda
    text = f"{gpu.driver or 'unknown'}, CUDA up to {gpu.cuda or 'unknown'}"
    needed, offered = _version(built_for), _version(gpu.cuda)
    if needed and offered and needed[0] > offered[0]:
        remedy = f"update the driver, or install torch for CUDA {gpu.cuda}"
        yield problem("driver", f"{text}; torch is built for CUDA {built_for}", remedy)
    elif needed and offered and needed > offered:
        remedy = "works by minor version compatibility, without newly compiled PTX; update the driver"
        yield warning("driver", f"{text}; torch is built for CUDA {built_for}", remedy)
    else:
        yield ok("driver", text)


def _power(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    lowered = [gpu for gpu in gpus if _below(gpu.power_limit_w, gpu.power_default_w)]
    for limits, group in _grouped(lowered, lambda gpu: (gpu.power_limit_w, gpu.power_default_w)):
        limit, default = limits
        remedy = f"sudo nvidia-smi {_selection(group, gpus)}-pl {default:.0f}, unless the site lowered it on purpose"
        yield warning(
            "power limit", f"{_names(group, gpus)}{limit:.0f} W, the part's default is {default:.0f} W", remedy
        )
    if not lowered:
        limits_w = sorted({f"{gpu.power_limit_w:.0f} W" for gpu in gpus if gpu.power_limit_w is not None})
        yield ok("power limit", ", ".join(limits_w) or "not reported")


def _clocks(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    slow = [gpu for gpu in gpus if _below(gpu.sm_clock_applied_mhz, gpu.sm_clock_default_mhz)]
    for clocks, group in _grouped(slow, lambda gpu: (gpu.sm_clock_applied_mhz, gpu.sm_clock_default_mhz)):
        text = f"{_names(group, gpus)}applications clock {clocks[0]} MHz, default {clocks[1]} MHz"
        yield warning("clocks", text, f"sudo nvidia-smi {_selection(group, gpus)}-rac")
    if not slow:
        clocks_mhz = sorted({gpu.sm_clock_max_mhz for gpu in gpus if gpu.sm_clock_max_mhz is not None})
        most = " and ".join(f"{clock} MHz" for clock in clocks_mhz)
        yield (
            warning("clocks", f"SM at most {most}", "GPUs differ in their highest clock: the slowest sets the pace")
            if len(clocks_mhz) > 1
            else ok("clocks", f"SM at most {most}" if most else "not reported")
        )


def _throttling(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    slowed = [gpu for gpu in gpus if set(gpu.throttling) & SLOWDOWNS.keys()]
    for reasons, group in _grouped(slowed, lambda gpu: tuple(r for r in gpu.throttling if r in SLOWDOWNS)):
        heat = ", ".join(sorted({f"{gpu.temperature_c:.0f} C" for gpu in group if gpu.temperature_c is not None}))
        text = f"{_names(group, gpus)}{', '.join(reasons)}" + (f" at {heat}" if heat else "")
        hardware = any("slowdown" in reason for reason in reasons)
        yield (problem if hardware else warning)("throttling", text, SLOWDOWNS[reasons[0]])
    if not slowed:
        at_limit = any("sw_power_cap" in gpu.throttling for gpu in gpus)
        yield ok("throttling", "only by the power limit, as under load" if at_limit else "none now")


def _memory_health(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    sick = False
    for gpu in gpus:
        if gpu.remap_failed or gpu.ecc_uncorrected:
            sick = True
            fault = "row remapping failed" if gpu.remap_failed else f"{gpu.ecc_uncorrected} uncorrected errors"
            yield problem("ECC", f"GPU {gpu.index}: {fault}", "results may be wrong: reset the GPU, then replace it")
        elif gpu.remap_pending:
            sick = True
            yield warning("ECC", f"GPU {gpu.index}: row remapping pending", "reset the GPU: sudo nvidia-smi -r")
        elif gpu.ecc is not None and gpu.ecc_pending is not None and gpu.ecc != gpu.ecc_pending:
            sick = True
            yield warning("ECC", f"GPU {gpu.index}: {_on(gpu.ecc)}, {_on(gpu.ecc_pending)} after a reset", "reset it")
    modes = {gpu.ecc for gpu in gpus}
    if len(modes) > 1:
        off = ", ".join(str(gpu.index) for gpu in gpus if not gpu.ecc)
        yield warning("ECC", f"off on GPU {off} only", "sudo nvidia-smi -e 1, then reset: bandwidth and memory differ")
    elif not sick:
        mode = gpus[0].ecc
        yield ok("ECC", "not supported" if mode is None else f"{_on(mode)}, no uncorrected error")


def _pcie(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    narrow = [gpu for gpu in gpus if _below(gpu.pcie_width, gpu.pcie_width_max)]
    for widths, group in _grouped(narrow, lambda gpu: (gpu.pcie_width, gpu.pcie_width_max)):
        text = f"{_names(group, gpus)}x{widths[0]} of x{widths[1]}"
        yield problem("PCIe", text, "copies between host and GPU are slow: reseat the card or riser, check the BIOS")
    slow = [gpu for gpu in gpus if _below(gpu.pcie_gen_max, gpu.pcie_gen_gpu)]
    for gens, group in _grouped(slow, lambda gpu: (gpu.pcie_gen_max, gpu.pcie_gen_gpu)):
        text = f"{_names(group, gpus)}generation {gens[0]} at most, the GPU supports {gens[1]}"
        yield warning("PCIe", text, "the slot, the CPU or a BIOS setting limits the link")
    for gpu in gpus:
        if (gpu.pcie_replays or 0) > MANY_REPLAYS:
            yield warning(
                "PCIe", f"GPU {gpu.index}: {gpu.pcie_replays} replays", "a bad contact: reseat the card or riser"
            )
    if not narrow and not slow:
        links = sorted({f"generation {gpu.pcie_gen_max} x{gpu.pcie_width}" for gpu in gpus if gpu.pcie_width})
        yield ok("PCIe", ", ".join(links) or "not reported")


def _links(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    for gpu in gpus:
        if gpu.fabric is not None and gpu.fabric != "Completed":
            remedy = (
                "sudo systemctl restart nvidia-fabricmanager, of the driver's own version; CUDA does not start before"
            )
            yield problem("NVLink", f"GPU {gpu.index}: NVSwitch fabric is {gpu.fabric.lower()}", remedy)
    active = [gpu.links or 0 for gpu in gpus]
    most, total = max(active), max(gpu.links_total or 0 for gpu in gpus)
    fewer = [gpu for gpu in gpus if (gpu.links or 0) < most]
    if fewer:
        names = ", ".join(f"GPU {gpu.index}: {gpu.links or 0}" for gpu in fewer)
        yield problem(
            "NVLink", f"{names} of {most} links active", "collectives run at the slowest: see nvidia-smi nvlink -e"
        )
    elif total and most < total:
        remedy = "on an SXM board all should be; a PCIe card with bridges has fewer"
        yield warning("NVLink", f"{most} of {total} links active on each GPU", remedy)
    else:
        yield ok("NVLink", f"{most} links on each GPU" if most else "none")


def _modes(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    if off := [gpu for gpu in gpus if gpu.persistence is False]:
        yield warning("persistence", f"{_names(off, gpus)}off", PERSISTENCE_REMEDY)
    if split := [gpu for gpu in gpus if gpu.mig]:
        yield warning("MIG", f"{_names(split, gpus)}on", "a run sees a slice of the GPU: sudo nvidia-smi -mig 0")
    if refused := [gpu for gpu in gpus if gpu.compute_mode == "Prohibited"]:
        yield problem("compute mode", f"{_names(refused, gpus)}Prohibited", "sudo nvidia-smi -c 0")


def _processes(gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    busy = False
    for gpu in gpus:
        used = gpu.memory_used_bytes or 0
        if gpu.processes:
            busy = True
            names = "; ".join(map(_process, gpu.processes))
            yield warning(
                "processes", f"GPU {gpu.index}: {names}", "wait for them, or choose other GPUs: they share its time"
            )
        elif used > USED_BYTES:
            busy = True
            text = f"GPU {gpu.index}: {used / GIB:.1f} GiB in use, by a process that is not visible here"
            yield warning("processes", text, "look for it outside of this container")
    if not busy:
        yield ok("processes", "none on any GPU")


def _process(process: GpuProcess) -> str:
    memory = "" if process.memory_bytes is None else f", {process.memory_bytes / GIB:.1f} GiB"
    return f"pid {process.pid} {process.name.rsplit('/', 1)[-1]}{memory}"


def _grouped(gpus: Sequence[GpuStatus], key: Callable[[GpuStatus], T]) -> Iterator[tuple[T, list[GpuStatus]]]:
    """Yield GPUs that have the same facts together, in their order."""
    groups: dict[T, list[GpuStatus]] = {}
    for gpu in gpus:
        groups.setdefault(key(gpu), []).append(gpu)
    yield from groups.items()


def _names(group: Sequence[GpuStatus], gpus: Sequence[GpuStatus]) -> str:
    """Return `GPU 3: `, or nothing where all GPUs are alike."""
    return "" if len(group) == len(gpus) else f"GPU {_indices(group)}: "


def _selection(group: Sequence[GpuStatus], gpus: Sequence[GpuStatus]) -> str:
    return "" if len(group) == len(gpus) else f"-i {_indices(group)} "


def _indices(group: Sequence[GpuStatus]) -> str:
    return ",".join(str(gpu.index) for gpu in group)


def _below(value: float | None, expected: float | None) -> bool:
    return value is not None and expected is not None and value < expected


def _on(mode: bool) -> str:
    return "on" if mode else "off"


def _version(text: str | None) -> tuple[int, ...]:
    parts = (text or "").split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
