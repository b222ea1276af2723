"""Sends runs to a Slurm lab and lets things go wrong meanwhile, at moments that a seed chooses.

    chaos = Chaos(lab, disk, random.Random(seed))
    chaos.rage(runs=40)          then all is mended, and Slurm has nothing left to do
    chaos.put                    how often each fault was put in
    chaos.killed                 starts of runs of which a rank was killed before it had said how it ended
    chaos.told                   what llmb-run told its users: job ids and run folders

Everything is done by programs as users have them: llmb-run in processes of its own, real daemons, real signals.
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

from lab_processes import daemons, kill, is_alive, lab_processes_of, parent_pid, wait_gone
from slurm_lab import SlurmLab
from small_disk import SmallDisk

from llmb.events import RunEnded, read

SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
RUN = [
    "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--proxy", "--seqlen", "32", "--set=steps=20",
    *(f"--set=model.{name}={value}" for name, value in SHAPE.items()),
]  # fmt: skip
LLMB_RUN = [sys.executable, "-m", "llmb.cli.llmb_run"]
AT_ONCE = 4  # runs that wait or go, before more are submitted
SUBMITTING_S = 0.5  # how long it takes, about
PATIENCE_S = 300.0
BELIEVING_S = 13.0  # how long Slurm takes a job for one that only begins, though its node knows nothing of it


class Process(NamedTuple):
    """A part of a run that goes on: the steward, the leash of its ranks, or a rank."""

    part: str
    pid: int
    work: Path  # the folder that this start of the run works in
    node: str
    rank: int


@dataclass
class Command:
    """An llmb-run that was started, and when it is to be killed."""

    process: subprocess.Popen
    arguments: list[str]
    out: Path
    err: Path
    kill_at: float | None = None


@dataclass
class FaultInjector:
    """One rage."""

    lab: SlurmLab
    disk: SmallDisk
    random: Random
    put: Counter = field(default_factory=Counter)
    killed: set[Path] = field(default_factory=set)
    told: list[dict] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # by any llmb-run that lived to its end: command line and errors
    diary: list[str] = field(default_factory=list)
    _commands: list[Command] = field(default_factory=list)
    _repairs: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _operated_at: float = 0.0
    _ask_nodes_at: float | None = None
    _started: int = 0

    def rage(self, runs: int, rounds: int, limit_s: float) -> None:
        """Inject every fault `rounds` times while `runs` runs begin; then repair everything."""
        often = [self.rank, self.steward, self.scancel, self.slurmd, self.node, self.controller]
        faults = rounds * [*often, self.rank, self.leash] + (rounds * [self.full_disk] if self.disk.mounted else [])
        self.random.shuffle(faults)
        points = sorted(self.random.uniform(0, runs - 1) for _ in faults)  # how many runs have begun by then
        next_fault, end = time.monotonic(), time.monotonic() + limit_s
        while self.begun() < runs or faults:
            assert time.monotonic() < end, f"{self.begun()} runs and {dict(self.put)} after {limit_s} s: {self.diary}"
            self._tend()
            self._operate()
            queue = None if self._submitting() else self._queue()
            if queue is not None and len(queue) < AT_ONCE:
                self._submit()
            due = faults and self.begun() >= points[-len(faults)] and time.monotonic() >= next_fault
            if due and len(self._repairs) < 2:
                fault = faults.pop(0)
                if fault():
                    self._note(fault.__name__)
                    next_fault = time.monotonic() + self.random.uniform(0.2, 4.0)
                else:  # nothing to hit: others first
                    faults.append(fault)
            time.sleep(0.05)
        self._mend()

    def begun(self) -> int:
        """Runs that were given nodes."""
        return sum(1 for _ in self.disk.folder.glob("workloads/*/experiments/*/*/*/allocation.json"))

    def llmb_run(self, *arguments: str, kill_after_s: float | None = None) -> None:
        """Start one; with a time it is killed then, with -9, and its sbatch lives on."""
        self._started += 1
        out, err = (self.lab.folder / f"llmb-run-{self._started}.{end}" for end in ("out", "err"))
        with out.open("w") as to_out, err.open("w") as to_err:  # a pipe that nobody empties would hold it up
            process = subprocess.Popen(
                [*LLMB_RUN, *arguments], cwd=self.lab.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err, start_new_session=True,
            )  # fmt: skip
        due = None if kill_after_s is None else time.monotonic() + kill_after_s
        self._commands.append(Command(process, list(arguments), out, err, due))

    @property
    def environment(self) -> dict[str, str]:
        here = {"LLMB_INSTALL": str(self.disk.folder), "PYTHONPATH": str(Path(__file__).parents[2])}
        return {**os.environ, **self.lab.environment, **here, "OMP_NUM_THREADS": "1"}

    # The faults. Each says whether there was anything to hit.

    def rank(self) -> bool:
        return self._kill_one("rank")

    def leash(self) -> bool:
        return self._kill_one("leash")

    def steward(self) -> bool:
        return self._kill_one("steward")

    def scancel(self) -> bool:
        jobs = self._queue()
        if jobs:
            self.lab.call("scancel", self.random.choice(jobs), check=False)
        return bool(jobs)

    def slurmd(self) -> bool:
        node = self.random.choice(self.lab.nodes)
        self.lab.kill_slurmd(node)
        self._later(self.random.uniform(0.5, 4.0), lambda: self.lab.start_slurmd(node))
        return True

    def node(self) -> bool:
        busy = sorted({process.node for process in self._processes()})
        if not busy:
            return False
        node = self.random.choice(busy)
        ranks = [process for process in self._processes("rank") if process.node == node]
        self.lab.crash_node(node)
        self._note_killed(ranks)
        self._later(self.random.uniform(0.2, 1.5), lambda: self._notice_crash(node))
        return True

    def controller(self) -> bool:
        """Often in the middle of a submission, which it may take to its grave."""
        if self.random.random() < 0.7:
            self._submit()
            time.sleep(self.random.uniform(0.0, 1.5 * SUBMITTING_S))
        self.lab.kill_controller()
        self._later(self.random.uniform(0.2, 3.0), self._start_controller)
        return True

    def full_disk(self) -> bool:
        self.disk.fill()
        self._later(self.random.uniform(0.5, 3.0), self.disk.free)
        return True

    def _start_controller(self) -> None:
        self.lab.start_controller()
        self._ask_nodes_at = time.monotonic() + BELIEVING_S

    def _notice_crash(self, node: str) -> None:
        """In less time than Slurm takes, which is less than a real machine needs to start again."""
        if daemons(self.lab.folder, "slurmctld"):
            self.lab.call("scontrol", "update", f"nodename={node}", "state=down", "reason=crash", check=False)
            self.lab.start_slurmd(node)
        else:
            self._later(0.5, lambda: self._notice_crash(node))

    def _kill_one(self, part: str) -> bool:
        found = list(self._processes(part))
        if not found:
            return False
        victim = self.random.choice(found)
        kill(victim.pid, signal.SIGKILL)
        wait_gone([victim.pid], 5.0)
        if part == "rank":
            self._note_killed([victim])
        return True

    def _note_killed(self, ranks: list[Process]) -> None:
        """Those that had not said how they ended; whoever adds a last word for one has not done so yet."""
        for rank in ranks:
            own = read(rank.work / f"events.rank{rank.rank}.jsonl")
            if not any(isinstance(event, RunEnded) and event.status == "ok" for event in own):
                self.killed.add(rank.work)

    def _processes(self, part: str | None = None) -> Iterator[Process]:
        modules = {"llmb.cli.job_runner": "steward", "llmb.launch.supervisor": "leash", "llmb.train": "rank"}
        for pid, environ in lab_processes_of(self.lab.folder):
            command = _command_line(pid).decode(errors="replace").split("\0")
            try:
                work = Path(os.readlink(f"/proc/{pid}/cwd"))
            except OSError:
                continue
            found = modules.get(command[2]) if command[1:2] == ["-m"] else None
            if found is None or part not in (None, found) or not is_alive(pid):
                continue
            if b"-m\0llmb.train" in _command_line(parent_pid(pid)):  # a fork that labels what the rank prints
                continue
            said = dict(word.partition(b"=")[::2] for word in environ)
            node, number = said.get(b"SLURMD_NODENAME", b"").decode(), int(said.get(b"RANK", b"0") or 0)
            yield Process(found, pid, work, node, number)

    # What goes on besides.

    def _submit(self) -> None:
        """A few runs, by an llmb-run that may be killed on its way."""
        scale = "2" if self.random.random() < 0.2 else "1"
        repeats = str(self.random.randint(1, 2) if scale == "2" else self.random.randint(2, 4))
        doomed = self.random.random() < 0.35
        after = self.random.uniform(0.1, 1.2) * SUBMITTING_S if doomed else None
        self.llmb_run("submit", *RUN, "--scale", scale, "-r", repeats, "--json", kill_after_s=after)
        if self.random.random() < 0.3:  # somebody looks, and may be killed at that too
            self.llmb_run("jobs", "--json", kill_after_s=self.random.choice([None, self.random.uniform(0.2, 0.6)]))

    def _submitting(self) -> bool:
        return any(command.arguments[0] == "submit" for command in self._commands)

    def _queue(self) -> list[str] | None:
        """What Slurm has to do; none: it cannot be asked, and trying would only take time."""
        if not daemons(self.lab.folder, "slurmctld"):
            return None
        return self.lab.call("squeue", "-h", "-o", "%i", check=False).split()

    def _tend(self) -> None:
        """Kill the llmb-run whose time has come, hear those that have ended, repair what is due."""
        now = time.monotonic()
        for command in list(self._commands):
            if command.kill_at is not None and now >= command.kill_at and command.process.poll() is None:
                command.process.kill()
                self._note("submitter" if command.arguments[0] == "submit" else "looker")
            if command.process.poll() is not None:
                self._commands.remove(command)
                self._hear(command)
        for repair in [repair for repair in self._repairs if now >= repair[0]]:
            self._repairs.remove(repair)
            repair[1]()
            self.diary.append(f"{time.monotonic() - self._began:.1f} repaired")

    def _hear(self, command: Command) -> None:
        out, err = command.out.read_text(), command.err.read_text()
        self.said.append(f"{' '.join(command.arguments[:2])}: exit {command.process.returncode}: {err}")
        if command.arguments[0] == "submit":
            self.told += [json.loads(line) for line in out.splitlines() if line.endswith("}")]

    def _mend(self) -> None:
        """Everything is repaired, nobody is killed any more, and Slurm ends what it still holds."""
        while self._repairs:
            self._tend()
            time.sleep(0.05)
        self.disk.free()
        self.lab.heal()
        end = time.monotonic() + PATIENCE_S
        while self._commands or self.lab.submitting() or self.lab.call("squeue", "-h") or any(self._processes()):
            self._tend()
            self._operate()
            assert time.monotonic() < end, (
                f"still there: {self._commands} {self.lab.call('squeue')} {list(self._processes())}"
            )
            time.sleep(0.2)
        self._note("quiet")

    def _operate(self) -> None:
        """As whoever runs the cluster: nodes that Slurm has drained come back, jobs that it holds are let go.

        A controller that gives an id twice finds the node still busy with the first, and drains it. One that was away
        takes minutes to ask the nodes which of its jobs have ended meanwhile, unless it is told to.
        """
        now = time.monotonic()
        if now < self._operated_at + 1.0 or not daemons(self.lab.folder, "slurmctld"):
            return
        self._operated_at = now
        if self._ask_nodes_at is not None and now >= self._ask_nodes_at:
            self._ask_nodes_at = None
            self.lab.call("scontrol", "reconfigure", check=False)
        for node in self.lab.call("sinfo", "-h", "-N", "-t", "drain,down,fail", "-o", "%N", check=False).split():
            self.lab.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        for line in self.lab.call("squeue", "-h", "-t", "pending", "-o", "%i %r", check=False).splitlines():
            job, reason = line.split(" ", 1)
            if "held" in reason.lower():
                self.lab.call("scontrol", "release", job, check=False)

    def _later(self, seconds: float, repair: Callable[[], None]) -> None:
        self._repairs.append((time.monotonic() + seconds, repair))

    def _note(self, what: str) -> None:
        self.put[what] += 1
        self.diary.append(f"{time.monotonic() - self._began:.1f} {what}")


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
