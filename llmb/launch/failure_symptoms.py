"""What a log's lines say about why a run failed: those of Slurm, the kernel, pyxis and enroot, CUDA, NCCL and torch.

    first_symptom(log, HARD) -> Symptom("oom_kill", "slurmstepd: error: Detected 1 oom-kill event(s) ...")

The kinds stand in the order in which they can be the cause of one another: a rank that is killed makes the others lose
their connections, never the other way round. Of one kind the first line counts.
"""

import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

Kind = Literal[
    "node_failure",  # Slurm or the silence of all its ranks says that a node is gone
    "preemption",
    "time_limit",
    "cancelled",
    "oom_kill",  # the kernel or Slurm ended a process for its memory
    "gpu_fault",
    "gpu_oom",  # the engine asked for more memory than its device has (the host, where it computes on CPUs)
    "container_missing",
    "weights_missing",
    "disk_full",
    "hung",  # no rank moved any more
    "nccl_timeout",
    "nccl_error",
    "network",  # ranks did not find or lost one another
    "killed",  # by SIGKILL; nobody says why
    "refused",  # the request is wrong
    "program_error",
]


class Symptom(NamedTuple):
    """A kind of failure and the line that shows it."""

    kind: Kind
    line: str


_NEAR = ".{0,300}"  # bounded, so that no garbage can make a search slow
_SIGNS: dict[Kind, tuple[str, ...]] = {  # of one kind those that say most in front
    "oom_kill": (
        rf"slurmstepd\S{{0,80}}: error:{_NEAR}(?:oom[-_]kill|[Ee]xceeded {_NEAR}memory limit)",
        rf"srun: error: {_NEAR}: Out Of Memory",
        r"oom-kill:constraint|Out of memory: Killed process|Memory cgroup out of memory",
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
_PATTERNS = {kind: tuple(map(re.compile, signs)) for kind, signs in _SIGNS.items()}
HARD: tuple[Kind, ...] = ("oom_kill", "gpu_fault")  # whatever else is said
SOFT: tuple[Kind, ...] = tuple(kind for kind in _PATTERNS if kind not in HARD)

_DUE_TO = re.compile(r"slurmstepd\S*: error: \*\*\* (?:JOB|STEP) .* CANCELLED AT \S+ DUE TO ([A-Z ]+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on ([\w.,\[\]-]+)")
_TASKS_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_PASSING = re.compile(  # an image that may be had a minute later
    r"curl: \((?:5|6|7|16|18|28|35|52|55|56|92)\)|Could not resolve host|Temporary failure in name resolution"
    r"|returned error code: (?:408|429|5\d\d)|[Tt]imed? ?out|Connection (?:refused|reset)"
)
_SPEAKERS = (
    re.compile(r"^srun: error: ([\w.-]+): tasks? "),
    re.compile(r"^slurmstepd-(\S+): "),
    re.compile(r"(?:^|\s)([\w.-]+):\d+:\d+ \[\d+\] .*NCCL "),
    re.compile(r"([\w.-]+) kernel: "),
)
_RANK_LABEL = re.compile(r"^\[rank(\d+)\]")


def first_symptom(text: str, kinds: Collection[Kind]) -> Symptom | None:
    """Of these kinds the one that can be the cause of the others."""
    for kind, patterns in _PATTERNS.items():
        if kind in kinds and (found := next(filter(None, (pattern.search(text) for pattern in patterns)), None)):
            begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
            return Symptom(kind, text[begin : end if end >= 0 else None].strip())
    return None


def slurm_ended_it(log: str) -> str | None:
    """What Slurm wrote into the log when it ended the job: TIME LIMIT, PREEMPTION, NODE FAILURE."""
    found = _DUE_TO.search(log)
    return found[1].strip() if found else None


def failed_nodes(log: str) -> tuple[str, ...]:
    """Nodes that srun lost, as it names them."""
    return tuple(dict.fromkeys(found[1] for found in _NODE_FAILED.finditer(log)))


class TasksEnded(NamedTuple):
    """A line of srun: some tasks of one node ended badly."""

    node: str
    tasks: tuple[int, ...]
    how: str  # Killed, Segmentation fault, Exited with exit code 1, Terminated


def tasks_ended(log: str) -> Iterator[TasksEnded]:
    """Every such line, the first to end in front."""
    for found in _TASKS_ENDED.finditer(log):
        yield TasksEnded(found[1], tuple(_counted(found[2])), found[3])


def speaker(line: str) -> tuple[str | None, int | None]:
    """Which node, or which rank, a line of the log is about; either may not be known."""
    node = next((found[1] for pattern in _SPEAKERS if (found := pattern.search(line))), None)
    rank = _RANK_LABEL.match(line)
    return node, int(rank[1]) if rank else None


def may_pass(log: str) -> bool:
    """Whether what kept an image from being fetched was the network, or a registry that was busy."""
    about = "\n".join(line for line in log.splitlines() if "pyxis" in line or "enroot" in line or "[ERROR]" in line)
    return bool(_PASSING.search(about))


def _counted(ranges: str) -> Iterator[int]:
    """The numbers of 0-1,5."""
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last if last.isdecimal() else first) + 1)
