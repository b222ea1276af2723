"""Every line that a rank prints begins with its number, `[rank3]: `, so that a log of many tells who said what.

A forked process reads what this one writes, by Python or by C, and passes it on. It outlives this one by as long as
there is something left to read: the last words of a rank that is killed are what one looks for.
"""

import os
import select
import signal

LONGEST_LINE = 2**16  # bytes; what is longer is passed on in pieces
STDOUT, STDERR = 1, 2
DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def label_output(rank: int) -> None:
    """From now on stdout and stderr are labelled. To be called before any thread is started."""
    together = os.path.sameopenfile(STDOUT, STDERR)  # one pipe keeps the order of what went to one place
    pipes = {stream: os.pipe() for stream in ((STDOUT,) if together else (STDOUT, STDERR))}
    if os.fork() == 0:
        for number in DEAF_TO:
            signal.signal(number, signal.SIG_IGN)  # it ends when there is nobody left to listen to
        for _, writer in pipes.values():
            os.close(writer)
        try:
            _pass_on({reader: stream for stream, (reader, _) in pipes.items()}, f"[rank{rank}]: ".encode())
        finally:
            os._exit(0)
    for stream, (reader, writer) in pipes.items():
        os.dup2(writer, stream)
        os.close(reader)
        os.close(writer)
    if together:
        os.dup2(STDOUT, STDERR)


def _pass_on(streams: dict[int, int], label: bytes) -> None:
    """Whole lines from each pipe to its stream, until all pipes are closed."""
    rests = dict.fromkeys(streams, b"")
    while rests:
        for reader in select.select(list(rests), [], [])[0]:
            chunk = os.read(reader, 65536)
            *lines, rest = (rests[reader] + chunk).split(b"\n")
            if rest and (not chunk or len(rest) > LONGEST_LINE):
                lines, rest = [*lines, rest], b""
            _write(streams[reader], b"".join(label + line + b"\n" for line in lines))
            if chunk:
                rests[reader] = rest
            else:
                del rests[reader]


def _write(stream: int, text: bytes) -> None:
    while text:
        text = text[os.write(stream, text) :]
