"""Submits runs to a Slurm lab and injects faults meanwhile, at times that a seed chooses.

    injector = FaultInjector(lab, disk, random.Random(seed))
    injector.run(runs=40, ...)   afterwards everything is repaired, and Slurm's queue is empty
    injector.injected            how often each fault was injected
    injector.killed              work folders of runs of which a rank was killed before it recorded its end
    injector.submissions         job ids and run folders that llmb-run printed

Everything is real: llmb-run in separate processes, Slurm's daemons, signals.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from lab_processes import daemons, is_alive, kill, lab_processes_of, parent_pid, wait_gone
from slurm_lab import SlurmLab
from small_disk import SmallDisk

from llmb.events import RunEnded, read

SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
RUN = [
    "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--proxy", "--seqlen", "32", "--set=steps=20",
    *(f"--set=model.{name}={value}" for name, value in SHAPE.items()),
]  # fmt: skip
LLMB_RUN = [sys.executable, "-m", "llmb.cli.llmb_run"]
MAX_QUEUED = 4  # jobs in the queue before more are submitted
SUBMIT_S = 0.5  # approximate duration of a submission
TIMEOUT_S = 300.0
JOB_START_GRACE_S = 13.0  # for so long Slurm considers a job starting, even if its node does not know it


class Process(NamedTuple):
    """Process of an active run: its job runner, the supervisor of its ranks, or a rank."""

    role: str
    pid: int
    work: Path  # work folder of this start of the run
    node: str
    rank: int


@dataclass
class Command:
    """Running llmb-run, and when to kill it."""

    process: subprocess.Popen
    arguments: list[str]
    out: Path
    err: Path
    kill_at: float | None = None


@dataclass
class FaultInjector:
    """One run of fault injection."""

    lab: SlurmLab
    disk: SmallDisk
    random: Random
    injected: Counter = field(default_factory=Counter)
    killed: set[Path] = field(default_factory=set)
    submissions: list[dict] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)  # of each llmb-run that exited: command line and stderr
    timeline: list[str] = field(default_factory=list)
    _commands: list[Command] = field(default_factory=list)
    _repairs: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _started_at: float = field(default_factory=time.monotonic)
    _recovered_at: float = 0.0
    _reconfigure_at: float | None = None
    _command_count: int = 0

    def run(self, runs: int, rounds: int, limit_s: float) -> None:
        """Inject every fault `rounds` times while `runs` runs start; then repair everything."""
        faults = rounds * [
            self.kill_rank, self.kill_job_runner, self.scancel, self.kill_slurmd, self.crash_node, self.kill_controller,
            self.kill_rank, self.kill_supervisor,
        ]  # fmt: skip
        faults += rounds * [self.fill_disk] if self.disk.mounted else []
        self.random.shuffle(faults)
        points = sorted(self.random.uniform(0, runs - 1) for _ in faults)  # number of runs started by then
        next_fault, end = time.monotonic(), time.monotonic() + limit_s
        while self.started_runs() < runs or faults:
            assert time.monotonic() < end, (
                f"{self.started_runs()} runs and {dict(self.injected)} after {limit_s} s: {self.timeline}"
            )
            self._poll()
            self._recover_slurm()
            queue = None if self._submitting() else self._queue()
            if queue is not None and len(queue) < MAX_QUEUED:
                self._submit()
            due = faults and self.started_runs() >= points[-len(faults)] and time.monotonic() >= next_fault
            if due and len(self._repairs) < 2:
                fault = faults.pop(0)
                if fault():
                    self._record(fault.__name__)
                    next_fault = time.monotonic() + self.random.uniform(0.2, 4.0)
                else:  # no target: others first
                    faults.append(fault)
            time.sleep(0.05)
        self._repair_all()

    def started_runs(self) -> int:
        """Return the number of runs that were allocated nodes."""
        return sum(1 for _ in self.disk.folder.glob("workloads/*/experiments/*/*/*/allocation.json"))

    def llmb_run(self, *arguments: str, kill_after_s: float | None = None) -> None:
        """Start llmb-run; after `kill_after_s` it gets SIGKILL, while its sbatch keeps running."""
        self._command_count += 1
        out, err = (self.lab.folder / f"llmb-run-{self._command_count}.{end}" for end in ("out", "err"))
        with out.open("w") as to_out, err.open("w") as to_err:  # an unread pipe would block it
            process = subprocess.Popen(
                [*LLMB_RUN, *arguments], cwd=self.lab.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err, start_new_session=True,
            )  # fmt: skip
        kill_at = None if kill_after_s is None else time.monotonic() + kill_after_s
        self._commands.append(Command(process, list(arguments), out, err, kill_at))

    @property
    def environment(self) -> dict[str, str]:
        settings = {"LLMB_INSTALL": str(self.disk.folder), "PYTHONPATH": str(Path(__file__).parents[2])}
        return {**os.environ, **self.lab.environment, **settings, "OMP_NUM_THREADS": "1"}

    # Faults. Each returns whether it had a target.

    def kill_rank(self) -> bool:
        return self._kill_process("rank")

    def kill_supervisor(self) -> bool:
        return self._kill_process("supervisor")

    def kill_job_runner(self) -> bool:
        return self._kill_process("job_runner")

    def scancel(self) -> bool:
        jobs = self._queue()
        if jobs:
            self.lab.call("scancel", self.random.choice(jobs), check=False)
        return bool(jobs)

    def kill_slurmd(self) -> bool:
        node = self.random.choice(self.lab.nodes)
        self.lab.kill_slurmd(node)
        self._later(self.random.uniform(0.5, 4.0), lambda: self.lab.start_slurmd(node))
        return True

    def crash_node(self) -> bool:
        busy = sorted({process.node for process in self._processes()})
        if not busy:
            return False
        node = self.random.choice(busy)
        ranks = [process for process in self._processes("rank") if process.node == node]
        self.lab.crash_node(node)
        self._record_killed(ranks)
        self._later(self.random.uniform(0.2, 1.5), lambda: self._report_crash(node))
        return True

    def kill_controller(self) -> bool:
        """Kill slurmctld, often during a submission, which may be lost with it."""
        if self.random.random() < 0.7:
            self._submit()
            time.sleep(self.random.uniform(0.0, 1.5 * SUBMIT_S))
        self.lab.kill_controller()
        self._later(self.random.uniform(0.2, 3.0), self._start_controller)
        return True

    def fill_disk(self) -> bool:
        self.disk.fill()
        self._later(self.random.uniform(0.5, 3.0), self.disk.free)
        return True

    def _start_controller(self) -> None:
        self.lab.start_controller()
        self._reconfigure_at = time.monotonic() + JOB_START_GRACE_S

    def _report_crash(self, node: str) -> None:
        """Set a crashed node down and restart its slurmd, sooner than Slurm itself would notice."""
        if daemons(self.lab.folder, "slurmctld"):
            self.lab.call("scontrol", "update", f"nodename={node}", "state=down", "reason=crash", check=False)
            self.lab.start_slurmd(node)
        else:
            self._later(0.5, lambda: self._report_crash(node))

    def _kill_process(self, role: str) -> bool:
        processes = list(self._processes(role))
        if not processes:
            return False
        victim = self.random.choice(processes)
        kill(victim.pid, signal.SIGKILL)
        wait_gone([victim.pid], 5.0)
        if role == "rank":
            self._record_killed([victim])
        return True

    def _record_killed(self, ranks: list[Process]) -> None:
        """Record the ranks that had not recorded an end; nobody has done so in their place yet."""
        for rank in ranks:
            events = read(rank.work / f"events.rank{rank.rank}.jsonl")
            if not any(isinstance(event, RunEnded) and event.status == "ok" for event in events):
                self.killed.add(rank.work)

    def _processes(self, role: str | None = None) -> Iterator[Process]:
        modules = {"llmb.cli.job_runner": "job_runner", "llmb.launch.supervisor": "supervisor", "llmb.train": "rank"}
        for pid, environ in lab_processes_of(self.lab.folder):
            command = _command_line(pid).decode(errors="replace").split("\0")
            try:
                work = Path(os.readlink(f"/proc/{pid}/cwd"))
            except OSError:
                continue
            process_role = modules.get(command[2]) if command[1:2] == ["-m"] else None
            if process_role is None or role not in (None, process_role) or not is_alive(pid):
                continue
            if b"-m\0llmb.train" in _command_line(parent_pid(pid)):  # a fork that labels the output of the rank
                continue
            variables = dict(word.partition(b"=")[::2] for word in environ)
            node, number = variables.get(b"SLURMD_NODENAME", b"").decode(), int(variables.get(b"RANK", b"0") or 0)
            yield Process(process_role, pid, work, node, number)

    # Submissions, queries and repairs.

    def _submit(self) -> None:
        """Submit a few runs with an llmb-run that may be killed meanwhile."""
        scale = "2" if self.random.random() < 0.2 else "1"
        repeats = str(self.random.randint(1, 2) if scale == "2" else self.random.randint(2, 4))
        killed = self.random.random() < 0.35
        after = self.random.uniform(0.1, 1.2) * SUBMIT_S if killed else None
        self.llmb_run("submit", *RUN, "--scale", scale, "-r", repeats, "--yes", "--json", kill_after_s=after)
        if self.random.random() < 0.3:  # a concurrent listing, which may be killed too
            self.llmb_run("jobs", "--json", kill_after_s=self.random.choice([None, self.random.uniform(0.2, 0.6)]))

    def _submitting(self) -> bool:
        return any(command.arguments[0] == "submit" for command in self._commands)

    def _queue(self) -> list[str] | None:
        """Return the jobs in the queue; None: the controller is down, and a query would only time out."""
        if not daemons(self.lab.folder, "slurmctld"):
            return None
        return self.lab.call("squeue", "-h", "-o", "%i", check=False).split()

    def _poll(self) -> None:
        """Kill each llmb-run that is due, collect the output of those that exited, run repairs that are due."""
        now = time.monotonic()
        for command in list(self._commands):
            if command.kill_at is not None and now >= command.kill_at and command.process.poll() is None:
                command.process.kill()
                self._record("submitter" if command.arguments[0] == "submit" else "lister")
            if command.process.poll() is not None:
                self._commands.remove(command)
                self._collect(command)
        for repair in [repair for repair in self._repairs if now >= repair[0]]:
            self._repairs.remove(repair)
            repair[1]()
            self.timeline.append(f"{time.monotonic() - self._started_at:.1f} repaired")

    def _collect(self, command: Command) -> None:
        out, err = command.out.read_text(), command.err.read_text()
        self.outputs.append(f"{' '.join(command.arguments[:2])}: exit {command.process.returncode}: {err}")
        if command.arguments[0] == "submit":
            self.submissions += [json.loads(line) for line in out.splitlines() if line.endswith("}")]

    def _repair_all(self) -> None:
        """Repair everything, stop injecting faults, and wait until Slurm's queue is empty."""
        while self._repairs:
            self._poll()
            time.sleep(0.05)
        self.disk.free()
        self.lab.heal()
        end = time.monotonic() + TIMEOUT_S
        while self._commands or self.lab.submitting() or self.lab.call("squeue", "-h") or any(self._processes()):
            self._poll()
            self._recover_slurm()
            assert time.monotonic() < end, (
                f"still active: {self._commands} {self.lab.call('squeue')} {list(self._processes())}"
            )
            time.sleep(0.2)
        self._record("quiet")

    def _recover_slurm(self) -> None:
        """Act as the administrator: resume nodes that Slurm has drained, release jobs that it holds.

        A controller that assigns an id twice finds the node still busy with the first job, and drains it. One that was
        down takes minutes to ask the nodes which of its jobs have ended, unless reconfigured.
        """
        now = time.monotonic()
        if now < self._recovered_at + 1.0 or not daemons(self.lab.folder, "slurmctld"):
            return
        self._recovered_at = now
        if self._reconfigure_at is not None and now >= self._reconfigure_at:
            self._reconfigure_at = None
            self.lab.call("scontrol", "reconfigure", check=False)
        for node in self.lab.call("sinfo", "-h", "-N", "-t", "drain,down,fail", "-o", "%N", check=False).split():
            self.lab.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        for line in self.lab.call("squeue", "-h", "-t", "pending", "-o", "%i %r", check=False).splitlines():
            job, reason = line.split(" ", 1)
            if "held" in reason.lower():
                self.lab.call("scontrol", "release", job, check=False)

    def _later(self, seconds: float, repair: Callable[[], None]) -> None:
        self._repairs.append((time.monotonic() + seconds, repair))

    def _record(self, event: str) -> None:
        self.injected[event] += 1
        self.timeline.append(f"{time.monotonic() - self._started_at:.1f} {event}")


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
