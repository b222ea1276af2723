"""Why a run failed, in one word and one line of evidence, whether it may be tried again, and without which nodes.

    named(end, job, log, events) -> Failure("node_failure", "node n3 went down (NODE_FAIL); rank 5 was on it", ...)
    failure_of(rundir, job)         the same, of a run folder

Pure: Slurm's word on the job, the run's last word, the end of the log, and which ranks went silent on which hosts.
Slurm knows best who ended the job. Then comes what nobody else can cause (the kernel killed a rank, a GPU broke), then
what the run says of itself, then a node all of whose ranks are gone without a word, then the rest of the log: ranks
that lost others complain louder than whoever was lost.

What is no fault of the run may be tried again, where it is known that it would not meet the same node.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmb.events import Event, RunEnded, RunStarted, read_all
from llmb.launch.engine_log import end_of
from llmb.launch.failure_symptoms import (
    HARD,
    SOFT,
    Kind,
    Symptom,
    failed_nodes,
    first_symptom,
    may_pass,
    slurm_ended_it,
    speaker,
    tasks_ended,
)
from llmb.launch.nccl_watchdog import collective_timeout
from llmb.launch.run_folder import RunDir
from llmb.launch.slurm.nodelist import node_names
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.launch.verdict import Verdict

LONGEST_REASON = 400  # characters

ALWAYS_AGAIN: tuple[Kind, ...] = ("node_failure", "preemption", "gpu_fault")
AGAIN_ELSEWHERE: tuple[Kind, ...] = ("hung", "nccl_timeout", "nccl_error", "network")  # where a node is to blame

_SLURM_STATES: dict[str, Kind] = {
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
_SLURM_ENDED: dict[str, Kind] = {
    "NODE FAILURE": "node_failure",
    "PREEMPTION": "preemption",
    "TIME LIMIT": "time_limit",
}
_WORDS: dict[Kind, str] = {
    "preemption": "a job of higher priority took the nodes",
    "time_limit": "the job's time limit ran out",
    "cancelled": "the job was cancelled",
    "oom_kill": "killed for want of host memory",
    "gpu_fault": "a GPU failed",
    "gpu_oom": "out of device memory",
    "container_missing": "the container cannot be started",
    "weights_missing": "weights or tokenizer are not there",
    "disk_full": "the disk is full",
    "nccl_timeout": "a collective did not end in time",
    "nccl_error": "NCCL failed",
    "network": "ranks did not find or lost one another",
    "killed": "killed for an unknown reason",
    "refused": "refused",
}
_STOPPED = re.compile(r"(?:interrupted by|ended by Slurm with) SIG")
_BY_THE_LEASH = re.compile(r"interrupted by SIG(?:USR1|TERM)|llmb-run ended before")  # nobody above had more to say
_EXCEPTION = re.compile(r"\b\w+(?:Error|Exception)\b: ")
_ENGINE_REFUSES = re.compile(r"^(?:\[rank\d+\]: )?llmb\.\w+: (.+)$", re.MULTILINE)


Finding = tuple[Kind, str, tuple[str, ...]]  # what, why, and the nodes to blame


@dataclass(frozen=True)
class Failure:
    """Why a run failed."""

    kind: Kind
    reason: str  # one line with the evidence
    retryable: bool = False
    guilty_nodes: tuple[str, ...] = ()  # to keep away from, as Slurm names them


def failure_of(rundir: RunDir, job: JobState | None) -> Failure | None:
    """Why the run in this folder failed; none: it did not, or goes on."""
    events = list(read_all(rundir.all_events()))
    end = next((event for event in reversed(events) if isinstance(event, RunEnded) and event.rank == 0), None)
    job_id = job.job_id if job is not None else rundir.job_id
    outputs = [rundir.log, *([rundir.slurm_output(job_id)] if job_id is not None else [])]
    return named(end, job, "\n".join(map(end_of, outputs)), events)


def named(
    end: RunEnded | Verdict | None, job: JobState | None = None, log: str = "", events: Iterable[Event] = ()
) -> Failure | None:
    """Why a run failed. `end`: its last word; `job`: Slurm's; `log`: its end; `events`: of all its ranks."""
    if end is not None and end.status == "ok":
        return None
    if end is None and job is not None and job.phase != "ended":
        return None
    scene = _Scene(end, job, log, list(events))
    kind, reason, nodes = scene.slurms_word() or scene.own_word() or scene.the_log() or scene.no_evidence()
    if kind in ALWAYS_AGAIN:
        return Failure(kind, _one_line(reason), True, nodes)
    if kind in AGAIN_ELSEWHERE:
        return Failure(kind, _one_line(reason), bool(nodes), nodes)
    return Failure(kind, _one_line(reason), kind == "container_missing" and may_pass(log))


class _Scene:
    """All that a failed run left behind."""

    def __init__(self, end: RunEnded | Verdict | None, job: JobState | None, log: str, events: Sequence[Event]):
        self.job, self.log = job, log
        self.status = end.status if end is not None else None
        self.said = (end.reason or "").strip() if end is not None else ""
        self.guilty_rank = end.guilty_rank if end is not None else None
        self.last_lines = end.last_lines if isinstance(end, RunEnded) else ()
        self.deaths = list(tasks_ended(log))
        started = {event.rank: event.host for event in events if isinstance(event, RunStarted)}
        ended = {event.rank for event in events if isinstance(event, RunEnded)}
        tasks = {task: death.node for death in self.deaths for task in death.tasks}
        self.nodes = {rank: tasks[rank] for rank in started if rank in tasks}  # our engine has one rank a task
        self.nodes |= {rank: node for rank, host in started.items() if (node := self._node(host)) is not None}
        self.silent = tuple(sorted(started.keys() - ended))

    def slurms_word(self) -> Finding | None:
        """Who ended the job, where that was neither the run nor its program."""
        state = self.job.state.partition(" ")[0] if self.job is not None and self.job.phase == "ended" else ""
        written = slurm_ended_it(self.log) or ("NODE FAILURE" if failed_nodes(self.log) else "")
        if state and self.job is not None and self.job.restarts:
            written = ""  # perhaps by what ended an earlier run of the job, whose output is in the same file
        kind = _SLURM_STATES.get(state) or _SLURM_ENDED.get(written)
        evidence = state if state in _SLURM_STATES else written
        if kind == "node_failure":
            return self._node_down(evidence)
        if kind == "oom_kill":
            found = first_symptom(self.log, ["oom_kill"])
            return self._from(found) if found else (kind, f"{_WORDS[kind]} ({evidence})", ())
        return (kind, f"{_WORDS[kind]} ({evidence})", ()) if kind else None

    def own_word(self) -> Finding | None:
        """What the run says of itself; before it what only the machine can have done."""
        if _BY_THE_LEASH.match(self.said) and self.job is not None and self.job.signal == 9:
            return "killed", f"the process that watched the run was killed; its ranks: {self.said}", ()
        if self.status == "timeout":
            return "time_limit", self.said or _WORDS["time_limit"], ()
        words = "\n".join((self.said, *self.last_lines))
        if found := first_symptom(words, HARD) or first_symptom(self.log, HARD):
            return self._from(found)
        if self.status == "incomplete" and _STOPPED.match(self.said):
            return "cancelled", self.said, ()
        if self.status == "oom":
            return "gpu_oom", self.said or _WORDS["gpu_oom"], ()
        if self.said.startswith("hung:"):
            return "hung", self.said, self._blamed()
        if found := first_symptom(words, SOFT):
            return None if found.kind in (*AGAIN_ELSEWHERE, "killed") else self._from(found)
        if self.status == "diverged":
            return "program_error", self.said or self.status, ()
        return self._mistake()

    def the_log(self) -> Finding | None:
        """What the log shows of a run that does not know itself."""
        everything = f"{self.log}\n{self.said}"
        found = first_symptom(everything, SOFT)
        if found is not None and found.kind not in (*AGAIN_ELSEWHERE, "killed"):
            return self._from(found)
        if killed := first_symptom(everything, ["killed"]):  # its node lives: somebody told of it
            return self._from(killed)
        if gone := self._silent_nodes():
            ranks = self._ranks_on(gone)
            reason = f"{_nodes(gone)} went silent: {_ranks(ranks)} gone without a word"
            return "node_failure", f"{reason}; {self.said}" if self.said else reason, gone
        if found is not None and found.kind == "nccl_timeout":
            return self._collective(found)
        return self._from(found) if found is not None else None

    def no_evidence(self) -> Finding:
        """The little that is known all the same."""
        if self.said:
            return "program_error", self.said, ()
        if self.job is not None and self.job.signal == 9:
            said = ", ".join(filter(None, (self.job.state, self.job.reason)))
            return "killed", f"{_WORDS['killed']} ({said})", ()
        if self.deaths:
            first = self.deaths[0]
            return "program_error", f"{_numbered('task', first.tasks)} on {first.node}: {first.how}", ()
        if self.job is None:
            return "killed", "the run was killed: no end was recorded", ()
        code = f", exit code {self.job.exit_code}" if self.job.exit_code else ""
        return "program_error", f"the job ended ({self.job.state}{code}), but the run did not say how", ()

    def _mistake(self) -> Finding | None:
        """An error of the program, or its refusal of the request, which it prints in one line and no rank is blamed."""
        said = self.said.partition(": ")[2] if re.match(r"rank \d+: ", self.said) else self.said
        if _EXCEPTION.match(said):
            return "program_error", self.said, ()
        refusals = {found[1].strip() for found in _ENGINE_REFUSES.finditer(self.log)}
        if self.guilty_rank is None and self.said and self.said in refusals:
            return "refused", self.said, ()
        return None

    def _from(self, found: Symptom) -> Finding:
        """A finding from a line of the log: what it shows, where, and the line."""
        node, rank = speaker(found.line)
        node = self.nodes.get(rank) if rank is not None else self._node(node)
        if rank is None and node is None:
            node = next(iter(self._blamed()), None)
        blamed = (node,) if found.kind == "gpu_fault" and node is not None else self._blamed()
        where = f" on {node}" if node is not None else ""
        return found.kind, f"{_WORDS[found.kind]}{where}: {found.line}", blamed

    def _node_down(self, evidence: str) -> Finding:
        down = tuple(name for part in failed_nodes(self.log) for name in node_names(part)) or self._silent_nodes()
        nodes = node_names(self.job.nodes) if self.job is not None else ()
        down = down or (nodes if len(nodes) == 1 else ())
        if not down:
            among = f", one of {self.job.nodes}" if self.job is not None and self.job.nodes else ""
            return "node_failure", f"a node went down ({evidence}){among}", ()
        ranks = self._ranks_on(down)
        there = f"; {_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} on it" if ranks else ""
        return "node_failure", f"{_nodes(down)} went down ({evidence}){there}", down

    def _collective(self, found: Symptom) -> Finding:
        """A collective that did not end: who was late, and where."""
        timeout = collective_timeout(self.log, self.silent)
        if timeout is None:
            return self._from(found)
        reason = f"{timeout.operation} did not end within {timeout.limit_s:g} s"
        if timeout.waiting:
            reason += f"; {_ranks(timeout.waiting)} waited"
        if timeout.late:
            reason += f"; {_ranks(timeout.late)} had not begun it"
        late = dict.fromkeys(node for rank in timeout.late if (node := self.nodes.get(rank)) is not None)
        nodes = tuple(late) or self._blamed()
        return "nccl_timeout", reason + (f" (on {', '.join(nodes)})" if nodes else ""), nodes

    def _blamed(self) -> tuple[str, ...]:
        """The node of the rank whose fault it was, else those whose ranks are all gone."""
        node = self.nodes.get(self.guilty_rank) if self.guilty_rank is not None else None
        return (node,) if node is not None else self._silent_nodes()

    def _silent_nodes(self) -> tuple[str, ...]:
        """Nodes none of whose ranks said how it ended, where ranks of others did."""
        all_nodes = dict.fromkeys(self.nodes[rank] for rank in sorted(self.nodes))
        gone = tuple(node for node in all_nodes if set(self._ranks_on((node,))) <= set(self.silent))
        return gone if len(gone) < len(all_nodes) else ()

    def _ranks_on(self, nodes: Sequence[str]) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, node in self.nodes.items() if node in nodes))

    def _node(self, host: str | None) -> str | None:
        """Slurm's name of a host, which may call itself by a longer one; none: no node of this job."""
        if host is None or self.job is None or not (names := node_names(self.job.nodes)):
            return host
        return next((name for name in (host, host.partition(".")[0]) if name in names), None)


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _ranks(ranks: Sequence[int]) -> str:
    return _numbered("rank", ranks)


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    """Rank 5; ranks 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."
