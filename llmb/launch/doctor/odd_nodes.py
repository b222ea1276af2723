"""Nodes that differ from the others: for each fact, the value that most nodes have and the nodes that have another.

odd_nodes({"n1": facts, "n2": facts, "n3": facts}) -> [OddFact(fact="ECC", usual="on", nodes={"n2": "off"})]
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmb.formats.nvidia_smi import GpuStatus
from llmb.launch.doctor.machine_facts import MachineFacts

GIB = 2**30
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class OddFact:
    """One fact in which nodes differ."""

    fact: str
    usual: str | None  # null: no value is more frequent than every other
    nodes: dict[str, str]  # nodes with another value; all of them where there is no usual one


def odd_nodes(machines: Mapping[str, MachineFacts]) -> list[OddFact]:
    """Return the facts in which nodes differ."""
    described = {name: comparable_facts(facts) for name, facts in machines.items()}
    names = dict.fromkeys(fact for facts in described.values() for fact in facts)
    odd = []
    for fact in names:
        values = {node: facts.get(fact, NONE) for node, facts in described.items()}
        ranked = Counter(values.values()).most_common(2)
        if len(ranked) == 1:
            continue
        usual = ranked[0][0] if ranked[0][1] > ranked[1][1] else None
        odd.append(OddFact(fact=fact, usual=usual, nodes={n: v for n, v in values.items() if v != usual}))
    return odd


def comparable_facts(facts: MachineFacts) -> dict[str, str]:
    """Return what should be the same on every node, as text."""
    host, software, gpus = facts.host, facts.software, facts.gpus
    values: dict[str, str | None] = {
        "GPUs": _each(gpus, lambda gpu: gpu.name) if gpus else NONE,
        "driver": gpus[0].driver if gpus else None,
        "power limit": _each(gpus, lambda gpu: gpu.power_limit_w and f"{gpu.power_limit_w:.0f} W"),
        "highest SM clock": _each(gpus, lambda gpu: gpu.sm_clock_max_mhz and f"{gpu.sm_clock_max_mhz} MHz"),
        "applications clock": _each(gpus, lambda gpu: gpu.sm_clock_applied_mhz and f"{gpu.sm_clock_applied_mhz} MHz"),
        "ECC": _each(gpus, lambda gpu: None if gpu.ecc is None else "on" if gpu.ecc else "off"),
        "PCIe": _each(gpus, lambda gpu: gpu.pcie_width and f"generation {gpu.pcie_gen_max} x{gpu.pcie_width}"),
        "NVLinks": _each(gpus, lambda gpu: gpu.links and str(gpu.links)),
        "MIG": _each(gpus, lambda gpu: "on" if gpu.mig else None),
        "CPU": host.cpu,
        "cores": str(host.cores_total),
        "governor": ", ".join(host.governors) or None,
        "NUMA nodes": str(host.numa_nodes),
        "host memory": None if host.memory_bytes is None else f"{host.memory_bytes / GIB:.0f} GiB",
        "InfiniBand": ", ".join(f"{port.name} {port.state} {port.rate}" for port in host.ports) or None,
        "kernel": host.kernel,
        "torch": software.torch,
        "NCCL": software.nccl,
        "Slurm": software.slurm,
        "containers": ", ".join(software.containers) or None,
    }
    return {fact: value for fact, value in values.items() if value is not None}


def _each(gpus: tuple[GpuStatus, ...], describe: Callable[[GpuStatus], str | int | float | None]) -> str | None:
    """Return the value of all GPUs, once where they agree: 8 x 700 W, or 700 W, 700 W, 400 W."""
    texts = [str(describe(gpu) or "unknown") for gpu in gpus]
    if not texts or set(texts) == {"unknown"}:
        return None
    return f"{len(texts)} x {texts[0]}" if len(set(texts)) == 1 else ", ".join(texts)
