"""Symptoms of failures in a log: lines of Slurm, the kernel, pyxis and enroot, CUDA, NCCL and torch.

    find_symptom(log, HARD) -> Symptom("oom_kill", "slurmstepd: error: Detected 1 oom-kill event(s) ...")

The kinds are ordered by causality: a rank that is killed makes the others lose their connections, never the other way
round. Of one kind the first line counts.
"""

import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

FailureKind = Literal[
    "node_failure",  # reported by Slurm, or all ranks of a node went silent
    "preemption",
    "time_limit",
    "cancelled",
    "oom_kill",  # the kernel or Slurm killed a process for its memory
    "gpu_fault",
    "gpu_oom",  # the engine exceeded the memory of its device (of the host, on CPUs)
    "container_missing",
    "weights_missing",
    "disk_full",
    "hung",  # no rank made progress
    "nccl_timeout",
    "nccl_error",
    "network",  # ranks could not connect, or lost the connection
    "killed",  # by SIGKILL, for an unknown reason
    "refused",  # the request is wrong
    "program_error",
]


class Symptom(NamedTuple):
    """Kind of failure and the line that shows it."""

    kind: FailureKind
    line: str


_NEAR = ".{0,300}"  # bounded, so that no input makes a search slow
_PATTERN_TEXTS: dict[FailureKind, tuple[str, ...]] = {  # of one kind the most specific first
    "oom_kill": (
        rf"slurmstepd\S{{0,80}}: error:{_NEAR}(?:oom[-_]kill|[Ee]xceeded {_NEAR}memory limit)",
        rf"srun: error: {_NEAR}: Out Of Memory",
        r"oom-kill:constraint|Out of memory: Killed process|Memory cgroup out of memory|the kernel's OOM killer",
    ),
    "gpu_fault": (
        r"NVRM: Xid|\bXid \d+\b|uncorrectable (?:ECC|NVLink) error|ECC_UNCORRECTABLE|fallen off the bus",
        r"CUDA error: (?:an illegal (?:memory access|instruction)|unspecified launch failure|hardware stack error"
        r"|misaligned address|invalid device ordinal|CUDA-capable device\(s\) is/are busy|no CUDA-capable device)",
        r"Unable to determine the device handle for GPU",
    ),
    "disk_full": (r"No space left on device|Disk quota exceeded",),
    "container_missing": (
        rf"pyxis: +\[ERROR\]|pyxis: {_NEAR}curl: \(\d+\)|\[ERROR\] URL {_NEAR} returned error code",
        r"\[ERROR\] No such file or directory: \S{0,300}\.sq",
        r"error: pyxis: (?:failed to|couldn't|container start failed)",
        r"unrecognized option '--container|enroot: command not found|spank_pyxis\.so: .{0,80}failed",
    ),
    "weights_missing": (
        r"is not a folder of weights|holds no weights|does not appear to have a file named",
        r"is not a local folder and is not a valid model identifier|Repository Not Found for url",
        r"GatedRepoError|Cannot access gated repo|[Cc]an't load (?:tokenizer|the model|the configuration)",
    ),
    "gpu_oom": (r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|OutOfMemoryError",),
    "nccl_timeout": (
        r"Watchdog caught collective operation timeout",
        rf"watchdog thread terminated with exception: {_NEAR}timeout|watchdog got stuck for \d+",
    ),
    "nccl_error": (
        rf"NET/IB ?: Got completion|NCCL WARN {_NEAR}(?:failed|error)",
        r"nccl(?:Unhandled\w{0,20}|System|Internal|Remote)Error|NCCL error in",
    ),
    "network": (
        r"DistNetworkError|DistStoreError|RendezvousConnectionError|RendezvousTimeoutError",
        r"Connection (?:refused|timed out|closed by (?:remote )?peer|reset by peer)|No route to host|Socket Timeout"
        r"|Timed out waiting|Application timeout caused pair closure|Name or service not known",
    ),
    "killed": (
        r"srun: error: \S{1,80}: tasks? [\d,-]+: Killed",
        r"killed by signal 9 \(SIGKILL\)|exit code 137\b",
    ),
    "refused": (rf"srun: error: Unable to create step for job {_NEAR}(?:permitted|not available|Invalid)",),
}
_PATTERNS = {kind: tuple(map(re.compile, texts)) for kind, texts in _PATTERN_TEXTS.items()}
HARD: tuple[FailureKind, ...] = ("oom_kill", "gpu_fault")  # outweigh any other symptom
SOFT: tuple[FailureKind, ...] = tuple(kind for kind in _PATTERNS if kind not in HARD)

_CANCELLED_DUE_TO = re.compile(r"slurmstepd\S*: error: \*\*\* (?:JOB|STEP) .* CANCELLED AT \S+ DUE TO ([A-Z ]+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on ([\w.,\[\]-]+)")
_TASKS_EXITED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_TRANSIENT = re.compile(  # the image may be available a minute later
    r"curl: \((?:5|6|7|16|18|28|35|52|55|56|92)\)|Could not resolve host|Temporary failure in name resolution"
    r"|returned error code: (?:408|429|5\d\d)|[Tt]imed? ?out|Connection (?:refused|reset)"
)
_NODE_PATTERNS = (
    re.compile(r"^srun on ([\w.-]+) (?:was )?killed by "),
    re.compile(r"^srun: error: ([\w.-]+): tasks? "),
    re.compile(r"^slurmstepd-(\S+): "),
    re.compile(r"(?:^|\s)([\w.-]+):\d+:\d+ \[\d+\] .*NCCL "),
    re.compile(r"([\w.-]+) kernel: "),
)
_RANK_LABEL = re.compile(r"^\[rank(\d+)\]")


def find_symptom(text: str, kinds: Collection[FailureKind]) -> Symptom | None:
    """Return the symptom of these kinds that can be the cause of the others."""
    for kind, patterns in _PATTERNS.items():
        if kind in kinds and (match := next(filter(None, (pattern.search(text) for pattern in patterns)), None)):
            begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            return Symptom(kind, text[begin : end if end >= 0 else None].strip())
    return None


def slurm_cancel_reason(log: str) -> str | None:
    """Return why Slurm ended the job, as it wrote into the log: TIME LIMIT, PREEMPTION, NODE FAILURE."""
    match = _CANCELLED_DUE_TO.search(log)
    return match[1].strip() if match else None


def lost_nodes(log: str) -> tuple[str, ...]:
    """Return the nodes that srun lost, as hostlists."""
    return tuple(dict.fromkeys(match[1] for match in _NODE_FAILED.finditer(log)))


class TasksExited(NamedTuple):
    """Line of srun: some tasks of one node failed."""

    node: str
    tasks: tuple[int, ...]
    status: str  # Killed, Segmentation fault, Exited with exit code 1, Terminated


def tasks_exited(log: str) -> Iterator[TasksExited]:
    """Yield every such line, in order."""
    for match in _TASKS_EXITED.finditer(log):
        yield TasksExited(match[1], tuple(_expand(match[2])), match[3])


def line_source(line: str) -> tuple[str | None, int | None]:
    """Return the node and the rank that a log line is about; either may be unknown."""
    node = next((match[1] for pattern in _NODE_PATTERNS if (match := pattern.search(line))), None)
    rank = _RANK_LABEL.match(line)
    return node, int(rank[1]) if rank else None


def is_transient(log: str) -> bool:
    """Return whether an image could not be fetched because of the network or a busy registry."""
    lines = [line for line in log.splitlines() if "pyxis" in line or "enroot" in line or "[ERROR]" in line]
    return bool(_TRANSIENT.search("\n".join(lines)))


def _expand(ranges: str) -> Iterator[int]:
    """Expand 0-1,5."""
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last if last.isdecimal() else first) + 1)
