"""Ranks forked from this process, which has torch imported already, so they start at once.

    results = on_ranks(4, work, *arguments)      # the return values of work(rank, *arguments)

Exit codes are ignored: gloo may abort a process that has done all its work.
"""

import gc
import io
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # torch.utils.checkpoint imports it when it is first called: once here, not in every rank

from llmb.serve.http.worker_processes import rendezvous_port

LIMIT_S = 300
LINGER_S = 60  # at most: all are killed when the last result has arrived


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `work(rank, *arguments)` in `world` processes, which can form a process group; return the results."""
    torch.set_num_threads(1)
    port = rendezvous_port()
    pipes = [os.pipe() for _ in range(world)]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # else the first collection writes to, and so copies, every page that is shared with the parent
            for peer, (_, writer) in enumerate(pipes):
                if peer != rank:
                    os.close(writer)  # a reader waits until every writer has closed its pipe
            _run_rank(rank, world, port, pipes[rank][1], work, arguments)
        pids.append(pid)
    try:
        for _, writer in pipes:
            os.close(writer)
        return [_read_result(rank, reader) for rank, (reader, _) in enumerate(pipes)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_rank(rank: int, world: int, port: int, writer: int, work: Callable[..., Any], arguments: Any) -> None:
    """Run `work` in a forked process and write its result to the pipe."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    signal.alarm(LIMIT_S)
    result = io.BytesIO()
    try:
        torch.save((True, work(rank, *arguments)), result)
    except BaseException:
        result = io.BytesIO()
        torch.save((False, traceback.format_exc()), result)
        time.sleep(0.5)  # ranks that fail because of this one should report later
    data = result.getvalue()
    while data:
        data = data[os.write(writer, data) :]
    os.close(writer)
    time.sleep(LINGER_S)  # exiting at once would break the others' last collective
    os._exit(0)


def _read_result(rank: int, reader: int) -> Any:
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    assert data, f"rank {rank} died without a result"
    succeeded, value = torch.load(io.BytesIO(data), weights_only=False)
    assert succeeded, f"rank {rank}:\n{value}"
    return value
