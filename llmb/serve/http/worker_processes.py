"""Engine processes of a server: one for each rank of each replica, connected by a socket.

    processes = start_workers(config_path, config, replicas=2, max_model_len=8192, exact=False)

They are started afresh, not forked, so that nothing of the HTTP process is in them. Rank r of replica i takes the GPU
with index i * ranks + r.
"""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from llmb.config.spec import RunConfig
from llmb.errors import LaunchError

WORKER_COMMAND = (sys.executable, "-m", "llmb.serve.http.engine_worker")
RENDEZVOUS_PORTS = range(20000, 32000)  # below the ephemeral port range
KILL_AFTER_S = 5.0  # a worker whose socket is closed exits by itself, unless its device hangs


@dataclass(eq=False)
class WorkerProcess:
    """One rank of one replica."""

    replica: int
    rank: int
    process: subprocess.Popen[bytes]
    sock: socket.socket

    @property
    def name(self) -> str:
        return f"engine {self.replica} rank {self.rank}"


def start_workers(
    config_path: Path,
    config: RunConfig,
    replicas: int,
    max_model_len: int,
    exact: bool,
    command: Sequence[str] = WORKER_COMMAND,
) -> list[WorkerProcess]:
    """Start all processes; `exact`: the KV cache must hold a sequence of max_model_len tokens."""
    world_size = config.parallel.world_size
    threads = max(1, len(os.sched_getaffinity(0)) // (replicas * world_size))
    workers = []
    for replica in range(replicas):
        port = rendezvous_port() if world_size > 1 else 0
        for rank in range(world_size):
            sock, worker_sock = socket.socketpair()
            environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LLMB_REPLICA": str(replica)}
            environment |= {"LOCAL_RANK": str(replica * world_size + rank)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            arguments = [str(config_path), str(worker_sock.fileno()), str(max_model_len), str(int(exact))]
            with closing(worker_sock):
                process = subprocess.Popen(
                    [*command, *arguments], env=environment, stdin=subprocess.DEVNULL, pass_fds=[worker_sock.fileno()]
                )
            workers.append(WorkerProcess(replica, rank, process, sock))
    return workers


def stop_workers(workers: Sequence[WorkerProcess], kill_now: bool = False) -> list[int]:
    """Wait for processes whose sockets are closed, kill those that stay; return the exit codes."""
    for worker in workers:
        if kill_now:
            worker.process.kill()
    codes = []
    for worker in workers:
        try:
            codes.append(worker.process.wait(KILL_AFTER_S))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            codes.append(worker.process.wait())
    return codes


def rendezvous_port() -> int:
    """Return a free port for MASTER_PORT, which the kernel gives to nobody else before rank 0 listens there."""
    for port in random.SystemRandom().sample(RENDEZVOUS_PORTS, 100):  # a seed would make processes choose alike
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"no port for a rendezvous is free among 100 of {RENDEZVOUS_PORTS[0]} to {RENDEZVOUS_PORTS[-1]}")
