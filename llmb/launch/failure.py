"""Diagnosis of a failed run: its kind, one line of evidence, whether to retry it, and which nodes to exclude.

    diagnose(end, job, log, events) -> Failure("node_failure", "node n3 went down (NODE_FAIL); rank 5 was on it", ...)
    diagnose_run(run_folder, job)      the same, of a run folder

Pure: Slurm's state of the job, the last RunEnded, the tail of the log, and which ranks went silent on which hosts.
Slurm knows best who ended the job. Then comes what nobody else can cause (the kernel killed a rank, a GPU broke), then
the run's own report, then a node all of whose ranks disappeared, then the rest of the log: ranks that lost the
connection to others complain louder than the one that was lost.

Failures that are not the run's own fault are retried, where it is known that the retry would not meet the same node.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmb.config.serialization import read_json
from llmb.errors import ConfigError
from llmb.events import Event, RunEnded, RunStarted, read_all
from llmb.launch.engine_log import read_log_tail
from llmb.launch.failure_symptoms import (
    HARD,
    SOFT,
    FailureKind,
    Symptom,
    find_symptom,
    is_transient,
    line_source,
    lost_nodes,
    slurm_cancel_reason,
    tasks_exited,
)
from llmb.launch.nccl_watchdog import collective_timeout
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.nodelist import node_names
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.launch.verdict import SUPERVISOR_KILLED, Verdict

MAX_REASON_CHARS = 400

ALWAYS_RETRIED: tuple[FailureKind, ...] = ("node_failure", "preemption", "gpu_fault")
RETRIED_ELSEWHERE: tuple[FailureKind, ...] = ("hung", "nccl_timeout", "nccl_error", "network")  # if a node is excluded

_SLURM_STATES: dict[str, FailureKind] = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "LAUNCH_FAILED": "node_failure",
    "RECONFIG_FAIL": "node_failure",
    "PREEMPTED": "preemption",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "OUT_OF_MEMORY": "oom_kill",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}
_SLURM_CANCEL_REASONS: dict[str, FailureKind] = {
    "NODE FAILURE": "node_failure",
    "PREEMPTION": "preemption",
    "TIME LIMIT": "time_limit",
}
_DESCRIPTIONS: dict[FailureKind, str] = {
    "preemption": "preempted by a job of higher priority",
    "time_limit": "the job's time limit was reached",
    "cancelled": "the job was cancelled",
    "oom_kill": "killed for exceeding host memory",
    "gpu_fault": "a GPU failed",
    "gpu_oom": "out of device memory",
    "container_missing": "the container cannot be started",
    "weights_missing": "weights or tokenizer not found",
    "disk_full": "the disk is full",
    "nccl_timeout": "a collective timed out",
    "nccl_error": "NCCL failed",
    "network": "ranks could not connect to each other",
    "killed": "killed for an unknown reason",
    "refused": "refused",
}
_STOPPED = re.compile(r"(?:interrupted by|ended by Slurm with) SIG")
_BY_SUPERVISOR = re.compile(r"interrupted by SIG(?:USR1|TERM)|llmb-run ended before")  # the job runner added nothing
_EXCEPTION = re.compile(r"\b\w+(?:Error|Exception)\b: ")
_ENGINE_REFUSAL = re.compile(r"^(?:\[rank\d+\]: )?llmb\.\w+: (.+)$", re.MULTILINE)


Diagnosis = tuple[FailureKind, str, tuple[str, ...]]  # kind, reason, and the nodes to exclude


@dataclass(frozen=True)
class Failure:
    """Diagnosed failure of a run."""

    kind: FailureKind
    reason: str  # one line with the evidence
    retryable: bool = False
    excluded_nodes: tuple[str, ...] = ()  # for a retry, as Slurm names them


def diagnose_run(run_folder: RunFolder, job: JobState | None) -> Failure | None:
    """Return why the run in this folder failed; None: it did not, or is still running."""
    events = list(read_all(run_folder.all_events()))
    end = next((event for event in reversed(events) if isinstance(event, RunEnded) and event.rank == 0), None)
    job_id = job.job_id if job is not None else run_folder.job_id
    outputs = [run_folder.log, *([run_folder.slurm_output(job_id)] if job_id is not None else [])]
    started = job is None or _began(run_folder, job)
    return diagnose(end, job, "\n".join(map(read_log_tail, outputs)), events, newest_start_began=started)


def _began(run_folder: RunFolder, job: JobState) -> bool:
    """Return whether the newest start of a job began: each writes first how often the job was requeued before."""
    if not job.restarts:
        return True
    try:
        restarts = read_json(run_folder.allocation).get("restarts")
    except (ConfigError, AttributeError):  # it wrote nothing
        return False
    return isinstance(restarts, int) and restarts >= job.restarts


def diagnose(
    end: RunEnded | Verdict | None,
    job: JobState | None = None,
    log: str = "",
    events: Iterable[Event] = (),
    newest_start_began: bool = True,
) -> Failure | None:
    """Return why a run failed. `end`: of rank 0; `job`: Slurm's state; `log`: its tail; `events`: of all ranks.

    `newest_start_began`: False where a requeued job failed before it started again; all else is of the start before.
    """
    if end is not None and end.status == "ok":
        return None
    if end is None and job is not None and job.phase != "ended":
        return None
    evidence = _Evidence(end, job, log, list(events), newest_start_began)
    kind, reason, nodes = (
        evidence.from_slurm() or evidence.from_run() or evidence.from_log() or evidence.without_symptoms()
    )
    if kind in ALWAYS_RETRIED:
        return Failure(kind, _one_line(reason), True, nodes)
    if kind in RETRIED_ELSEWHERE:
        return Failure(kind, _one_line(reason), bool(nodes), nodes)
    return Failure(kind, _one_line(reason), kind == "container_missing" and is_transient(log))


class _Evidence:
    """Everything that a failed run left behind."""

    def __init__(
        self, end: RunEnded | Verdict | None, job: JobState | None, log: str, events: Sequence[Event], began: bool
    ):
        self.job, self.log, self.began = job, log, began
        self.status = end.status if end is not None else None
        self.run_reason = (end.reason or "").strip() if end is not None else ""
        self.failed_rank = end.failed_rank if end is not None else None
        self.last_lines = end.last_lines if isinstance(end, RunEnded) else ()
        self.task_exits = list(tasks_exited(log))
        started = {event.rank: event.host for event in events if isinstance(event, RunStarted)}
        ended = {event.rank for event in events if isinstance(event, RunEnded)}
        tasks = {task: exited.node for exited in self.task_exits for task in exited.tasks}
        self.nodes = {rank: tasks[rank] for rank in started if rank in tasks}  # our engine has one rank per task
        self.nodes |= {rank: node for rank, host in started.items() if (node := self._node(host)) is not None}
        self.silent = tuple(sorted(started.keys() - ended))

    def from_slurm(self) -> Diagnosis | None:
        """Diagnose from Slurm's state, where neither the run nor its program ended the job."""
        state = self.job.state.partition(" ")[0] if self.job is not None and self.job.phase == "ended" else ""
        cancel_reason = slurm_cancel_reason(self.log) or ("NODE FAILURE" if lost_nodes(self.log) else "")
        if state and self.job is not None and self.job.restarts and self.began:
            cancel_reason = ""  # may be of an earlier run of the job, whose output is in the same file
        kind = _SLURM_STATES.get(state) or _SLURM_CANCEL_REASONS.get(cancel_reason)
        source = state if state in _SLURM_STATES else cancel_reason
        if kind is None and state and not self.began:  # requeued for a node, as no other cause is known
            kind, source = "node_failure", f"{state} after a requeue, before the run could start again"
        if kind == "node_failure":
            return self._node_failure(source)
        if kind == "oom_kill":
            symptom = find_symptom(self.log, ["oom_kill"])
            return self._from_symptom(symptom) if symptom else (kind, f"{_DESCRIPTIONS[kind]} ({source})", ())
        return (kind, f"{_DESCRIPTIONS[kind]} ({source})", ()) if kind else None

    def from_run(self) -> Diagnosis | None:
        """Diagnose from the run's own report; before it from symptoms that only the machine can cause."""
        if _BY_SUPERVISOR.match(self.run_reason) and self.job is not None and self.job.signal == 9:
            return "killed", f"the job runner was killed; its ranks: {self.run_reason}", ()
        if self.run_reason.startswith(SUPERVISOR_KILLED):
            return "killed", self.run_reason, ()
        if self.status == "timeout":
            return "time_limit", self.run_reason or _DESCRIPTIONS["time_limit"], ()
        report = "\n".join((self.run_reason, *self.last_lines))
        if symptom := find_symptom(report, HARD) or find_symptom(self.log, HARD):
            return self._from_symptom(symptom)
        if self.status == "incomplete" and _STOPPED.match(self.run_reason):
            return "cancelled", self.run_reason, ()
        if self.status == "oom":
            return "gpu_oom", self.run_reason or _DESCRIPTIONS["gpu_oom"], ()
        if self.run_reason.startswith("hung:"):
            return "hung", self.run_reason, self._culprits()
        if symptom := find_symptom(report, SOFT):
            return None if symptom.kind in (*RETRIED_ELSEWHERE, "killed") else self._from_symptom(symptom)
        if self.status == "diverged":
            return "program_error", self.run_reason or self.status, ()
        return self._from_program()

    def from_log(self) -> Diagnosis | None:
        """Diagnose from the log of a run that does not know itself why it failed."""
        text = f"{self.log}\n{self.run_reason}"
        symptom = find_symptom(text, SOFT)
        if symptom is not None and symptom.kind not in (*RETRIED_ELSEWHERE, "killed"):
            return self._from_symptom(symptom)
        if killed := find_symptom(text, ["killed"]):  # reported by a node, which is therefore up
            return self._from_symptom(killed)
        if nodes := self._silent_nodes():
            ranks = self._ranks_on(nodes)
            reason = f"{_format_nodes(nodes)} went silent: {_format_ranks(ranks)} disappeared without an exit status"
            return "node_failure", f"{reason}; {self.run_reason}" if self.run_reason else reason, nodes
        if symptom is not None and symptom.kind == "nccl_timeout":
            return self._collective_timeout(symptom)
        return self._from_symptom(symptom) if symptom is not None else None

    def without_symptoms(self) -> Diagnosis:
        """Diagnose from the exit status alone."""
        if self.run_reason:
            return "program_error", self.run_reason, ()
        if self.job is not None and self.job.signal == 9:
            state = ", ".join(filter(None, (self.job.state, self.job.reason)))
            return "killed", f"{_DESCRIPTIONS['killed']} ({state})", ()
        if self.task_exits:
            first = self.task_exits[0]
            return "program_error", f"{_format_numbers('task', first.tasks)} on {first.node}: {first.status}", ()
        if self.job is None:
            return "killed", "the run was killed: no end was recorded", ()
        code = f", exit code {self.job.exit_code}" if self.job.exit_code else ""
        return "program_error", f"the job ended ({self.job.state}{code}), but the run recorded no end", ()

    def _from_program(self) -> Diagnosis | None:
        """Diagnose an exception, or a refusal, which the program prints in one line without blaming a rank."""
        reason = self.run_reason.partition(": ")[2] if re.match(r"rank \d+: ", self.run_reason) else self.run_reason
        if _EXCEPTION.match(reason):
            return "program_error", self.run_reason, ()
        refusals = {match[1].strip() for match in _ENGINE_REFUSAL.finditer(self.log)}
        if self.failed_rank is None and self.run_reason and self.run_reason in refusals:
            return "refused", self.run_reason, ()
        return None

    def _from_symptom(self, symptom: Symptom) -> Diagnosis:
        """Diagnose from a line of the log: its kind, the node, and the line."""
        node, rank = line_source(symptom.line)
        node = self.nodes.get(rank) if rank is not None else self._node(node)
        if rank is None and node is None:
            node = next(iter(self._culprits()), None)
        culprits = (node,) if symptom.kind == "gpu_fault" and node is not None else self._culprits()
        location = f" on {node}" if node is not None else ""
        return symptom.kind, f"{_DESCRIPTIONS[symptom.kind]}{location}: {symptom.line}", culprits

    def _node_failure(self, source: str) -> Diagnosis:
        down = tuple(name for nodes in lost_nodes(self.log) for name in node_names(nodes)) or self._silent_nodes()
        allocated = node_names(self.job.nodes) if self.job is not None else ()
        down = down or (allocated if len(allocated) == 1 else ())
        if not down:
            candidates = f", one of {self.job.nodes}" if self.job is not None and self.job.nodes else ""
            return "node_failure", f"a node went down ({source}){candidates}", ()
        ranks = self._ranks_on(down)
        affected = f"; {_format_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} on it" if ranks else ""
        return "node_failure", f"{_format_nodes(down)} went down ({source}){affected}", down

    def _collective_timeout(self, symptom: Symptom) -> Diagnosis:
        """Diagnose a collective that timed out: which ranks were late, and on which nodes."""
        timeout = collective_timeout(self.log, self.silent)
        if timeout is None:
            return self._from_symptom(symptom)
        reason = f"{timeout.operation} timed out after {timeout.limit_s:g} s"
        if timeout.waiting:
            reason += f"; {_format_ranks(timeout.waiting)} waited"
        if timeout.late:
            reason += f"; {_format_ranks(timeout.late)} had not entered it"
        late = dict.fromkeys(node for rank in timeout.late if (node := self.nodes.get(rank)) is not None)
        nodes = tuple(late) or self._culprits()
        return "nccl_timeout", reason + (f" (on {', '.join(nodes)})" if nodes else ""), nodes

    def _culprits(self) -> tuple[str, ...]:
        """Return the node of the failed rank, else those whose ranks have all disappeared."""
        node = self.nodes.get(self.failed_rank) if self.failed_rank is not None else None
        return (node,) if node is not None else self._silent_nodes()

    def _silent_nodes(self) -> tuple[str, ...]:
        """Return the nodes none of whose ranks recorded an end, where ranks of other nodes did."""
        all_nodes = dict.fromkeys(self.nodes[rank] for rank in sorted(self.nodes))
        silent_nodes = tuple(node for node in all_nodes if set(self._ranks_on((node,))) <= set(self.silent))
        return silent_nodes if len(silent_nodes) < len(all_nodes) else ()

    def _ranks_on(self, nodes: Sequence[str]) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, node in self.nodes.items() if node in nodes))

    def _node(self, host: str | None) -> str | None:
        """Return Slurm's name of a host, whose hostname may be longer; None: not a node of this job."""
        if host is None or self.job is None or not (names := node_names(self.job.nodes)):
            return host
        return next((name for name in (host, host.partition(".")[0]) if name in names), None)


def _format_nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _format_ranks(ranks: Sequence[int]) -> str:
    return _format_numbers("rank", ranks)


def _format_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Format as rank 5; ranks 0-3, 7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    text = ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in ranges)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {text}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
