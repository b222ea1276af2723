"""Private Slurm for tests: a controller and several nodes with fake GPUs on this one host, optionally with accounting.

    with SlurmLab(folder, nodes=4, gpus=8) as lab:
        subprocess.run(["sinfo"], env={**os.environ, **lab.environment})
        lab.crash_node("n2")

Real daemons, started as root without systemd; all their files are in `folder`. They do not outlive the process that
started them: a LabReaper waits for its exit and stops the lab, and if it is killed too, the next lab does.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import lab_config
import lab_registry
from lab_processes import daemons, kill, kill_tasks, lab_processes_of, runs_program, stop_lab, wait_gone
from lab_reaper import LabReaper

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacct", "mariadbd", "mariadb-install-db", "mariadb-admin")
# Upper limits, for a busy machine.
START_S = 120.0
CALL_S = 60.0


def unavailable_reason(accounting: bool = False, cgroup: bool = False) -> str | None:
    """Return why no lab can be started here; None: one can."""
    if os.geteuid() != 0:
        return "a Slurm lab needs root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    if absent := [program for program in programs if shutil.which(program, path=path) is None]:
        return f"not installed: {', '.join(absent)}"
    if cgroup and not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK):
        return "no writable memory cgroup (version 1)"
    return None


class SlurmLab:
    """Separate Slurm cluster. `settings` replace or add lines of slurm.conf."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        gpus: int = 8,
        cpus: int = 32,
        memory_mib: int = 16000,
        accounting: bool = False,
        cgroup: bool = False,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
    ):
        self.folder = folder
        self.nodes = tuple(f"n{i}" for i in range(1, nodes + 1))
        self.gpus = gpus
        self._cpus = cpus
        self._memory_mib = memory_mib
        self._accounting = accounting
        self._cgroup = cgroup
        self._port = port
        self._settings = dict(settings or {})
        self._undo = ExitStack()
        self._first_port = 0  # of its port range while it is up
        self._resets = 0  # how often the controller started without its state

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes, which this host resolves."""
        return self.nodes

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process reaches this Slurm."""
        return {"SLURM_CONF": str(self.folder / "etc/slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}

    def __enter__(self) -> "SlurmLab":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        with ExitStack() as undo:
            if self._cgroup:
                undo.enter_context(lab_registry.exclusive("cgroup", wait_s=600))  # cgroup names do not tell labs apart
            claim = lab_registry.claim(self.folder, len(self.nodes), stop_lab, self._port)
            undo.callback(claim.release)
            undo.callback(stop_lab, self.folder)
            self._first_port = claim.port
            self._write_config(claim.port)
            undo.enter_context(LabReaper(claim.port))
            self._start_munge()
            if self._accounting:
                self._start_accounting()
            self.start_controller(forget=True)
            for node in self.nodes:
                self.start_slurmd(node)
            self._wait(self._all_idle, "all nodes idle")
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Stop everything, jobs and their processes too; the folder with the logs stays."""
        self._undo.close()

    def start_controller(self, forget: bool = False) -> None:
        """Start slurmctld. `forget`: without its earlier jobs, whose ids it does not assign again."""
        if forget:
            self._change_config(FirstJobId=lab_config.first_job_id(self._first_port, self._resets))
            self._resets += 1
        self._daemon("slurmctld", *(["-i", "-c"] if forget else []))
        self._wait(lambda: "is UP" in self.call("scontrol", "ping", check=False), "the controller to respond")

    def kill_controller(self) -> None:
        """Kill slurmctld with SIGKILL: it loses what it has not saved yet, a few seconds of submissions."""
        self._kill("slurmctld")

    def stop_controller(self) -> None:
        """Shut slurmctld down as for an update: it saves its state first."""
        self.call("scontrol", "shutdown", "slurmctld")
        self._wait(lambda: not self._alive("slurmctld"), "the controller to end")

    def freeze_controller(self) -> None:
        """Stop slurmctld: it accepts connections but responds to none before `thaw_controller`."""
        for pid in daemons(self.folder, "slurmctld"):
            kill(pid, signal.SIGSTOP)

    def thaw_controller(self) -> None:
        for pid in daemons(self.folder, "slurmctld"):
            kill(pid, signal.SIGCONT)

    def wait_until_saved(self, job: str) -> None:
        """Wait until the controller has saved the current state of this job.

        The job gets a mark: a saved state with the mark is newer than everything that happened to the job before.
        """
        mark = uuid4().hex
        self.call("scontrol", "update", f"jobid={job}", f"admincomment={mark}")
        self._wait(lambda: mark.encode() in self._saved_state(), "the controller to save its jobs")

    @contextmanager
    def unable_to_save(self) -> Iterator[None]:
        """Prevent the controller from saving jobs: changes meanwhile are lost when it is killed."""
        obstacle = self.folder / "state/job_state.new"  # written before it is renamed
        self._wait(lambda: _try_mkdir(obstacle), "the controller to have saved its jobs")
        try:
            yield
        finally:
            obstacle.rmdir()

    def submitting(self) -> bool:
        """Return whether an sbatch is running: it outlives a caller that is killed."""
        return any(runs_program(pid, "sbatch") for pid, _ in lab_processes_of(self.folder))

    def wait_for_submissions(self) -> None:
        self._wait(lambda: not self.submitting(), "the end of each sbatch")

    def cancel_all(self) -> None:
        self.call("scancel", "--user=root", check=False)

    def start_slurmd(self, node: str) -> None:
        self._daemon("slurmd", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """Kill only the daemon: its steps and their tasks continue."""
        self._kill(f"slurmd-{node}")

    def crash_node(self, node: str) -> None:
        """Kill slurmd, steps (before they can report anything) and tasks at once, as in a power failure."""
        self.kill_slurmd(node)
        kill_tasks(self.folder, node)

    def down(self, node: str, reason: str = "test") -> None:
        """Set a node down: its jobs end with NODE_FAIL within a second."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")

    def resume(self, node: str) -> None:
        self.call("scontrol", "update", f"nodename={node}", "state=resume")

    def heal(self) -> None:
        """Restart dead daemons and resume nodes that are down, after a test that broke them."""
        self.thaw_controller()
        if not self._alive("slurmctld"):
            self.start_controller()
        dead_nodes = [node for node in self.nodes if not self._alive(f"slurmd-{node}")]
        for node in dead_nodes:
            self.start_slurmd(node)
        if dead_nodes or self._down_nodes():
            self._wait(self._all_up, "all nodes up")

    def give_accounts(self, *accounts: str) -> None:
        """Add accounts to root, who may have some of them already; the first becomes the default."""
        for account in accounts:
            if not self.call("sacctmgr", "-n", "show", "account", account).strip():
                self.call("sacctmgr", "-i", "add", "account", account, "description=d", "organization=o")
            if not self.call("sacctmgr", "-n", "show", "associations", "user=root", f"account={account}").strip():
                self.call("sacctmgr", "-i", "add", "user", "root", f"account={account}")
        self.call("sacctmgr", "-i", "modify", "user", "root", "set", f"defaultaccount={accounts[0]}")

    def call(self, *command: str, check: bool = True) -> str:
        """Run one of Slurm's programs and return its output."""
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CALL_S,
            )
        except subprocess.TimeoutExpired:
            if check:
                raise
            return ""
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stdout}{done.stderr}".strip())
        return done.stdout

    def _write_config(self, port: int) -> None:
        folder = self.folder
        for name in ("etc", "run", "log", "state", "munge", "dev", *(f"spool/{node}" for node in self.nodes)):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(self.gpus):
            with suppress(FileExistsError):
                (folder / f"dev/gpu{i}").symlink_to("/dev/null")  # Slurm needs a device file for each
        size = {"nodes": len(self.nodes), "gpus": self.gpus}
        etc = folder / "etc"
        (etc / "gres.conf").write_text(lab_config.gres_conf(folder, **size))
        (etc / "slurm.conf").write_text(
            lab_config.slurm_conf(
                folder,
                port,
                **size,
                cpus=self._cpus,
                memory_mib=self._memory_mib,
                accounting=self._accounting,
                cgroup=self._cgroup,
                settings=self._settings,
            )
        )
        if self._cgroup:
            (etc / "cgroup.conf").write_text(lab_config.CGROUP)
        if self._accounting:
            (etc / "slurmdbd.conf").write_text(lab_config.slurmdbd_conf(folder, port))
            (etc / "slurmdbd.conf").chmod(0o600)

    def _change_config(self, **settings: object) -> None:
        """Change settings that are in slurm.conf already."""
        path = self.folder / "etc/slurm.conf"
        text = path.read_text()
        for name, value in settings.items():
            text = re.sub(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        temporary = path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(path)

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        (munge / "munge.key").unlink(missing_ok=True)
        (munge / "munge.key").write_bytes(os.urandom(1024))
        (munge / "munge.key").chmod(0o400)
        self._daemon(
            "munged",
            "--force",  # permissions of the parent folders are not as strict as munge requires
            "--num-threads=4",
            f"--key-file={munge}/munge.key",
            f"--socket={lab_config.munge_socket(self.folder)}",
            f"--seed-file={munge}/munge.seed",
            f"--pid-file={self.folder}/run/munged.pid",
            f"--log-file={self.folder}/log/munged.log",
        )

    def _start_accounting(self) -> None:
        data, socket = self.folder / "db", self.folder / "run/mariadb.sock"
        if not (data / "mysql").exists():
            root = ["--auth-root-authentication-method=socket", "--skip-test-db"]
            self._daemon("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", *root)
        database = subprocess.Popen(
            [
                "mariadbd",
                "--no-defaults",
                "--user=root",
                "--skip-networking",
                f"--datadir={data}",
                f"--socket={socket}",
                f"--pid-file={self.folder}/run/mariadb.pid",
                f"--log-error={self.folder}/log/mariadb.log",
                "--innodb-buffer-pool-size=64M",
                "--innodb-flush-log-at-trx-commit=2",
            ],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ping = ["mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"]
        self._wait(lambda: database.poll() is None and "alive" in self.call(*ping, check=False), "the database")
        self._daemon("slurmdbd", MYSQL_UNIX_PORT=str(socket))
        self._wait(lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"), "the accounting daemon")
        if not self.call("sacctmgr", "-n", "show", "cluster", "lab").strip():
            self.call("sacctmgr", "-i", "add", "cluster", "lab")

    def _daemon(self, *command: str, **environment: str) -> None:
        """Run a command that goes into the background. Output to a file: a pipe would wait for the daemon's end."""
        with open(self.folder / "log/start.log", "a+") as log:
            done = subprocess.run(
                command,
                env={**os.environ, **self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_S,
            )
            if done.returncode:
                log.seek(0)
                raise RuntimeError(f"{command[0]} did not start: {log.read()[-500:]}")

    def _wait(self, condition: Callable[[], bool], event: str) -> None:
        end = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"the Slurm lab in {self.folder} waited {START_S:g} s for {event}")
            time.sleep(0.05)

    def _succeeds(self, *command: str) -> bool:
        try:
            self.call(*command)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False
        return True

    def _saved_state(self) -> bytes:
        """Return the job state that the controller has saved."""
        try:
            return (self.folder / "state/job_state").read_bytes()
        except FileNotFoundError:  # none yet, or it is just being replaced
            return b""

    def _states(self) -> list[tuple[str, str]]:
        lines = self.call("sinfo", "-h", "-N", "-o", "%N %t", check=False).splitlines()
        return [(node, state) for node, state in (line.split() for line in lines)]

    def _all_idle(self) -> bool:
        states = self._states()
        return len(states) == len(self.nodes) and all(state == "idle" for _, state in states)

    def _down_nodes(self) -> list[str]:
        return [node for node, state in self._states() if state.rstrip("*") in ("down", "drain", "drng", "fail", "unk")]

    def _all_up(self) -> bool:
        for node in self._down_nodes():
            self.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        states = self._states()
        up = ("idle", "mix", "alloc", "comp", "plnd")
        return len(states) == len(self.nodes) and all(state in up for _, state in states)

    def _alive(self, daemon: str) -> bool:
        return bool(daemons(self.folder, daemon))

    def _kill(self, daemon: str) -> None:
        for pid in daemons(self.folder, daemon):
            kill(pid, signal.SIGKILL)
            wait_gone([pid], START_S)


def _try_mkdir(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
