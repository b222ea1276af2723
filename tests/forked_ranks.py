"""Ranks that are forked from this process, which has torch in memory already: they start at once.

    answers = on_ranks(4, work, *arguments)      # what work(rank, *arguments) returned on each

Ranks are judged by what they wrote: gloo may abort a process that has done all its work.
"""

import io
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

LIMIT_S = 300
LINGER_S = 60  # at most: all are ended when the last has answered


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `work(rank, *arguments)` in that many processes, which can form a process group; what each returned."""
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [os.pipe() for _ in range(world)]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            for other, (_, writer) in enumerate(pipes):
                if other != rank:
                    os.close(writer)  # whoever reads the other's answer waits until all have closed it
            _be_rank(rank, world, port, pipes[rank][1], work, arguments)
        pids.append(pid)
    try:
        for _, writer in pipes:
            os.close(writer)
        return [_answer(rank, reader) for rank, (reader, _) in enumerate(pipes)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_rank(rank: int, world: int, port: int, writer: int, work: Callable[..., Any], arguments: Any) -> None:
    """The life of a forked process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    signal.alarm(LIMIT_S)
    answer = io.BytesIO()
    try:
        torch.save((True, work(rank, *arguments)), answer)
    except BaseException:
        answer = io.BytesIO()
        torch.save((False, traceback.format_exc()), answer)
        time.sleep(0.5)  # those who fail because of this one should not be heard first
    data = answer.getvalue()
    while data:
        data = data[os.write(writer, data) :]
    os.close(writer)
    time.sleep(LINGER_S)  # who leaves at once breaks the others' last exchange
    os._exit(0)


def _answer(rank: int, reader: int) -> Any:
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    assert data, f"rank {rank} died without a word"
    good, value = torch.load(io.BytesIO(data), weights_only=False)
    assert good, f"rank {rank}:\n{value}"
    return value
