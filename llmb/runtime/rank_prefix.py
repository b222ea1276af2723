"""Prefix of every line that a rank prints, `[rank3]: `, so that the log of many ranks shows who printed what.

A forked process reads what this one writes, from Python or from C, and forwards it. It outlives this one until its
pipes are drained: the last lines of a killed rank are the ones that matter.
"""

import os
import select
import signal

LONGEST_LINE = 2**16  # bytes; longer lines are split
STDOUT, STDERR = 1, 2
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def prefix_output(rank: int) -> None:
    """Prefix stdout and stderr from now on; call it before any thread is started."""
    same_file = os.path.sameopenfile(STDOUT, STDERR)  # then one pipe keeps their order
    pipes = {stream: os.pipe() for stream in ((STDOUT,) if same_file else (STDOUT, STDERR))}
    if os.fork() == 0:
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # it exits when all writers have closed
        for _, writer in pipes.values():
            os.close(writer)
        try:
            _forward_lines({reader: stream for stream, (reader, _) in pipes.items()}, f"[rank{rank}]: ".encode())
        finally:
            os._exit(0)
    for stream, (reader, writer) in pipes.items():
        os.dup2(writer, stream)
        os.close(reader)
        os.close(writer)
    if same_file:
        os.dup2(STDOUT, STDERR)


def _forward_lines(streams: dict[int, int], prefix: bytes) -> None:
    """Forward whole lines from each pipe to its stream until all pipes are closed."""
    tails = dict.fromkeys(streams, b"")
    while tails:
        for reader in select.select(list(tails), [], [])[0]:
            chunk = os.read(reader, 65536)
            *lines, tail = (tails[reader] + chunk).split(b"\n")
            if tail and (not chunk or len(tail) > LONGEST_LINE):
                lines, tail = [*lines, tail], b""
            _write(streams[reader], b"".join(prefix + line + b"\n" for line in lines))
            if chunk:
                tails[reader] = tail
            else:
                del tails[reader]


def _write(stream: int, text: bytes) -> None:
    while text:
        text = text[os.write(stream, text) :]
