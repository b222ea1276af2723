"""Findings about the host: CPU and NUMA, memory, network, disk, torch, NCCL, Slurm, containers, tokens."""

from collections.abc import Iterator

from llmb.launch.doctor.disk_facts import DiskFacts
from llmb.launch.doctor.finding import Finding, ok, problem, warning
from llmb.launch.doctor.host_facts import NO_NODE
from llmb.launch.doctor.machine_facts import MachineFacts

GB, GIB = 1e9, 2**30
STEADY_GOVERNORS = {"performance"}
SHM_BYTES = 1 * GIB  # NCCL takes some tens of MiB per rank and channel; Docker's default is 64 MiB
LITTLE_DISK, NO_DISK = 20 * GB, 1 * GB  # a profiled run takes some GB, a run without any some MB
INSTALL = "$LLMB_INSTALL"
VOLATILE = ("tmpfs", "ramfs", "overlay")
# NCCL settings that disable a fast path and are often left over from debugging.
SLOWING = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe peer copies", "NCCL_SHM_DISABLE": "shared memory",
    "NCCL_IB_DISABLE": "InfiniBand", "NCCL_NVLS_ENABLE": "NVLink SHARP",
}  # fmt: skip


def host_findings(facts: MachineFacts) -> Iterator[Finding]:
    """Yield one or more lines for each thing to look at."""
    yield from _cpu(facts)
    yield from _numa(facts)
    yield from _memory(facts)
    yield from _network(facts)
    yield from _torch(facts)
    yield from _nccl(facts)
    yield from _slurm(facts)
    containers = ", ".join(facts.software.containers)
    yield ok("containers", containers or "no runtime found; native runs need none")
    for disk in facts.disks[:1]:
        yield _disk(INSTALL, disk)
    for disk in facts.disks[1:]:
        yield _disk("Hugging Face cache", disk)
    present = [name for name, is_set in facts.software.tokens.items() if is_set]
    absent = [name for name, is_set in facts.software.tokens.items() if not is_set]
    words = [f"{', '.join(present)} present"] * bool(present) + [f"no {', '.join(absent)}"] * bool(absent)
    yield ok("tokens", "; ".join(words) + ("; gated models need HF_TOKEN" if "HF_TOKEN" in absent else ""))


def _cpu(facts: MachineFacts) -> Iterator[Finding]:
    host = facts.host
    cores = f"{host.cores} cores" if host.cores == host.cores_total else f"{host.cores} of {host.cores_total} cores"
    yield ok("CPU", f"{host.cpu or 'unknown'}, {cores}")
    slow = [name for name in host.governors if name not in STEADY_GOVERNORS]
    if slow:
        remedy = "sudo cpupower frequency-set -g performance: launch times vary with the clock"
        yield warning("governor", ", ".join(slow), remedy)
    else:
        yield ok("governor", ", ".join(host.governors) or "set by the hypervisor or firmware")


def _numa(facts: MachineFacts) -> Iterator[Finding]:
    host = facts.host
    nodes = host.numa_nodes or 1
    if nodes > 1 and host.numa_balancing:
        remedy = "sudo sysctl kernel.numa_balancing=0: the kernel moves pages while ranks run"
        yield warning("NUMA", f"{nodes} nodes, automatic balancing on", remedy)
        return
    unknown = [bus for bus, node in (host.gpu_numa or {}).items() if node == NO_NODE]
    if nodes > 1 and unknown:
        remedy = "the BIOS or hypervisor hides where GPUs are: ranks cannot be placed beside them"
        yield warning("NUMA", f"{nodes} nodes, {len(unknown)} GPUs on none of them", remedy)
        return
    placed = sorted({node for node in (host.gpu_numa or {}).values() if node != NO_NODE})
    where = f", GPUs on {', '.join(map(str, placed))}" if nodes > 1 and placed else ""
    yield ok("NUMA", f"{nodes} node{'s' if nodes > 1 else ''}{where}")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    host = facts.host
    size = "unknown" if host.memory_bytes is None else f"{host.memory_bytes / GIB:.0f} GiB"
    if host.shm_bytes is not None and host.shm_bytes < SHM_BYTES:
        remedy = "NCCL and data loaders may fail: start the container with --ipc=host or --shm-size=16g"
        yield warning("host memory", f"{size}, /dev/shm only {host.shm_bytes / 2**20:.0f} MiB", remedy)
    else:
        yield ok("host memory", size)


def _network(facts: MachineFacts) -> Iterator[Finding]:
    host = facts.host
    if not host.ports:
        return
    down = [port for port in host.ports if port.state != "ACTIVE"]
    rates = ", ".join(sorted({port.rate for port in host.ports if port.state == "ACTIVE"}))
    if down:
        names = ", ".join(f"{port.name} {port.state}" for port in down)
        yield warning("InfiniBand", f"{names}; {len(host.ports) - len(down)} active", "check cables, or ibstat")
    else:
        yield ok("InfiniBand", f"{len(host.ports)} ports active, {rates}")
    if host.memlock_bytes is not None:
        limit = f"{host.memlock_bytes / 2**20:.0f} MiB"
        yield warning("memlock", f"{limit} may be locked", "RDMA needs more: ulimit -l unlimited")


def _torch(facts: MachineFacts) -> Iterator[Finding]:
    software = facts.software
    if software.torch is None:
        yield warning("torch", "not installed", "needed where models run, not on a login node: pip install torch")
    elif facts.gpus and software.torch_cuda == "cpu":
        yield problem("torch", f"{software.torch}, built without CUDA", "install torch for CUDA: see pytorch.org")
    else:
        built = f", CUDA {software.torch_cuda}" if software.torch_cuda not in (None, "cpu") else ""
        yield ok("torch", f"{software.torch}{built}, Python {software.python}")


def _nccl(facts: MachineFacts) -> Iterator[Finding]:
    software = facts.software
    settings = software.nccl_settings
    slowing = [
        f"{name}={value}" for name, value in settings.items()
        if name in SLOWING and (value == "0") == (name == "NCCL_NVLS_ENABLE")
    ]  # fmt: skip
    text = software.nccl or "no package: one GPU or a CPU needs none"
    if slowing:
        paths = ", ".join(SLOWING[item.partition("=")[0]] for item in slowing)
        yield warning("NCCL", f"{text}; {', '.join(slowing)}", f"unset it unless intended: it turns off {paths}")
    else:
        names = f"; set: {', '.join(settings)}" if settings else ""
        yield ok("NCCL", text + names)


def _slurm(facts: MachineFacts) -> Iterator[Finding]:
    software = facts.software
    if software.slurm is None:
        yield ok("Slurm", "not installed: runs are local")
    elif software.slurm_error:
        remedy = "sudo systemctl status slurmctld munge on the controller; local runs work: --on local"
        yield warning("Slurm", f"{software.slurm}; {software.slurm_error}", remedy)
    else:
        yield ok("Slurm", software.slurm)


def _disk(name: str, disk: DiskFacts) -> Finding:
    free = "unknown" if disk.free_bytes is None else f"{disk.free_bytes / GB:.0f} GB free"
    text = f"{name} {disk.path}: {free}, {disk.filesystem or 'unknown file system'}"
    if not disk.writable:
        judge = problem if name == INSTALL else warning  # without a cache, weights are read from folders
        return judge("disk", f"{text}, not writable", "choose another folder, or change its permissions")
    if disk.free_bytes is not None and disk.free_bytes < NO_DISK and name == INSTALL:
        return problem("disk", text, "a run could not store its events: free some space")
    if disk.free_bytes is not None and disk.free_bytes < LITTLE_DISK:
        return warning("disk", text, "checkpoints, profiles and weights need more")
    if disk.filesystem in VOLATILE:
        return warning("disk", text, "results are lost with the container or at a restart: choose a folder on a disk")
    return ok("disk", text)
