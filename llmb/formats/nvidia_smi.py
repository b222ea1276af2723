"""Report of nvidia-smi on each GPU: limits, clocks, what throttles, ECC, PCIe, NVLink, processes.

    gpus, error = query_gpus()           every GPU of this machine; `error`: why there are none, or not all
    parse_gpus(xml), parse_links(text)   the same from recorded output

Element names differ between drivers (power_readings, gpu_power_readings); what a driver does not report is null.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from xml.etree import ElementTree

TIMEOUT_S = 60.0  # eight GPUs without persistence mode are initialized one after the other
NO_PROGRAM = "nvidia-smi is not installed"
ACTIVE = "Active"
IDLE = "gpu_idle"  # the one reason for low clocks that says nothing
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """One process with memory on a GPU."""

    pid: int
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """One GPU. Null: the driver does not say."""

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus: str | None = None  # 0000:3b:00.0, as under /sys/bus/pci/devices
    driver: str | None = None
    cuda: str | None = None  # the newest version that the driver supports
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_max_w: float | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    sm_clock_applied_mhz: int | None = None  # applications clock; null: none can be set
    sm_clock_default_mhz: int | None = None  # its default
    throttling: tuple[str, ...] = ()  # active now: sw_power_cap, hw_thermal_slowdown, ...
    temperature_c: float | None = None
    ecc: bool | None = None
    ecc_pending: bool | None = None  # after the next reset
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_failed: bool | None = None  # memory rows that could not be replaced by spare ones
    remap_pending: bool | None = None  # waiting for a reset
    pcie_gen_max: int | None = None  # of this GPU in this slot
    pcie_gen_gpu: int | None = None  # that the GPU could do elsewhere
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    fabric: str | None = None  # state of the NVSwitch fabric: Completed; null: none
    links: int | None = None  # NVLinks that are active; null: it has none
    links_total: int | None = None
    processes: tuple[GpuProcess, ...] = ()


def query_gpus(device: str | None = None, links: bool = True) -> tuple[list[GpuStatus], str | None]:
    """Return the GPUs of this machine and, where nvidia-smi failed, its message in one line.

    `device`: only this one, by index or UUID; `links`: ask for NVLinks too, by a second call.
    """
    if shutil.which("nvidia-smi") is None:
        return [], NO_PROGRAM
    selected = [] if device is None else ["-i", device]
    text, error = _run("-q", "-x", *selected)
    try:
        gpus = parse_gpus(text)
    except ElementTree.ParseError:
        return [], error or "nvidia-smi printed no XML"
    if links and gpus:
        gpus = with_links(gpus, _run("nvlink", "--status", *selected)[0])
    return gpus, error


def parse_gpus(xml: str) -> list[GpuStatus]:
    """Parse the output of `nvidia-smi -q -x`."""
    root = ElementTree.fromstring(xml)
    driver, cuda = _text(root, "driver_version"), _text(root, "cuda_version")
    return [replace(_gpu(i, node), driver=driver, cuda=cuda) for i, node in enumerate(root.findall("gpu"))]


def with_links(gpus: Iterable[GpuStatus], text: str) -> list[GpuStatus]:
    """Add the NVLinks that `nvidia-smi nvlink --status` lists, by UUID."""
    counts = parse_links(text)
    counted = [counts.get(gpu.uuid or "", (None, None)) for gpu in gpus]
    return [replace(gpu, links=up, links_total=total) for gpu, (up, total) in zip(gpus, counted, strict=True)]


def parse_links(text: str) -> dict[str, tuple[int, int]]:
    """Return active NVLinks and all of them, by UUID of the GPU."""
    links: dict[str, tuple[int, int]] = {}
    uuid = ""
    for line in text.splitlines():
        if header := re.match(r"\s*GPU \d+: .*\(UUID: (\S+)\)", line):
            uuid = header[1]
        elif (link := re.match(r"\s*Link \d+: (.+)", line)) and uuid:
            speed = re.match(r"([\d.]+) GB/s", link[1])
            up, total = links.get(uuid, (0, 0))
            links[uuid] = (up + bool(speed and float(speed[1])), total + 1)
    return links


def _gpu(index: int, node: ElementTree.Element) -> GpuStatus:
    power = "gpu_power_readings" if node.find("gpu_power_readings") is not None else "power_readings"
    pcie = "pci/pci_gpu_link_info"
    volatile = node.find("ecc_errors/volatile")
    bus = _text(node, "pci/pci_bus_id")
    fabric = _text(node, "fabric/state")
    return GpuStatus(
        index=index,
        name=_text(node, "product_name"),
        uuid=_text(node, "uuid"),
        pci_bus=None if bus is None else bus.lower()[-12:],
        memory_bytes=_mib(node, "fb_memory_usage/total"),
        memory_used_bytes=_mib(node, "fb_memory_usage/used"),
        power_limit_w=_number(node, f"{power}/current_power_limit", f"{power}/enforced_power_limit",
                              f"{power}/power_limit"),
        power_default_w=_number(node, f"{power}/default_power_limit"),
        power_max_w=_number(node, f"{power}/max_power_limit"),
        sm_clock_max_mhz=_whole(node, "max_clocks/sm_clock"),
        memory_clock_max_mhz=_whole(node, "max_clocks/mem_clock"),
        sm_clock_applied_mhz=_whole(node, "applications_clocks/graphics_clock"),
        sm_clock_default_mhz=_whole(node, "default_applications_clocks/graphics_clock"),
        throttling=_throttling(node),
        temperature_c=_number(node, "temperature/gpu_temp"),
        ecc=_flag(node, "ecc_mode/current_ecc"),
        ecc_pending=_flag(node, "ecc_mode/pending_ecc"),
        ecc_uncorrected=None if volatile is None else _uncorrected(volatile),
        remap_failed=_flag(node, "remapped_rows/remapped_row_failure"),
        remap_pending=_flag(node, "remapped_rows/remapped_row_pending"),
        pcie_gen_max=_whole(node, f"{pcie}/pcie_gen/max_link_gen"),
        pcie_gen_gpu=_whole(node, f"{pcie}/pcie_gen/max_device_link_gen"),
        pcie_width=_whole(node, f"{pcie}/link_widths/current_link_width"),
        pcie_width_max=_whole(node, f"{pcie}/link_widths/max_link_width"),
        pcie_replays=_whole(node, "pci/replay_counter"),
        persistence=_flag(node, "persistence_mode"),
        mig=_flag(node, "mig_mode/current_mig"),
        compute_mode=_text(node, "compute_mode"),
        fabric=fabric,
        processes=tuple(_processes(node)),
    )  # fmt: skip


def _throttling(node: ElementTree.Element) -> tuple[str, ...]:
    """Return the reasons that hold clocks down, except idleness."""
    for kind in ("event", "throttle"):
        reasons = node.find(f"clocks_{kind}_reasons")
        if reasons is not None:
            prefix = f"clocks_{kind}_reason_"
            names = [reason.tag.removeprefix(prefix) for reason in reasons if (reason.text or "").strip() == ACTIVE]
            return tuple(name for name in names if name != IDLE)
    return ()


def _uncorrected(volatile: ElementTree.Element) -> int | None:
    """Return the sum of uncorrectable errors of SRAM and DRAM; older drivers give a total of double-bit errors."""
    named = [item for item in volatile if "uncorrectable" in item.tag] or volatile.findall("double_bit/total")
    counts = [int(text) for item in named if (text := (item.text or "").strip()).isdigit()]
    return sum(counts) if counts else None


def _processes(node: ElementTree.Element) -> Iterable[GpuProcess]:
    for item in node.findall("processes/process_info"):
        pid = _text(item, "pid")
        if pid is not None and pid.isdigit():
            name = _text(item, "process_name") or "?"
            yield GpuProcess(pid=int(pid), name=name, memory_bytes=_mib(item, "used_memory"))


def _text(node: ElementTree.Element, path: str) -> str | None:
    """Return the text of an element; None for the several ways in which drivers say that there is none."""
    text = (node.findtext(path) or "").strip()
    return None if not text or text in ("N/A", "[N/A]", "None") or "deprecated" in text or "Error" in text else text


def _number(node: ElementTree.Element, *paths: str) -> float | None:
    """Return the number before a unit, of the first path that has one."""
    for path in paths:
        if number := re.match(r"-?\d+(\.\d+)?", _text(node, path) or ""):
            return float(number[0])
    return None


def _whole(node: ElementTree.Element, path: str) -> int | None:
    number = _number(node, path)
    return None if number is None else int(number)


def _mib(node: ElementTree.Element, path: str) -> int | None:
    number = _number(node, path)
    return None if number is None else int(number) * MIB


def _flag(node: ElementTree.Element, path: str) -> bool | None:
    text = _text(node, path)
    return None if text is None else text in ("Enabled", "Yes")


def _run(*arguments: str) -> tuple[str, str | None]:
    """Return the output of nvidia-smi, and its message if it failed."""
    try:
        process = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"nvidia-smi failed: {error}"
    if process.returncode == 0:
        return process.stdout, None
    lines = (process.stderr or process.stdout).strip().splitlines()
    return process.stdout, f"nvidia-smi failed: {lines[0] if lines else f'exit {process.returncode}'}"
