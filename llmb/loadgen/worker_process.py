"""Process of the client: `python -m llmb.loadgen.worker_process`, started by load_test.py.

Commands arrive as JSON lines on stdin (setup, warmup, start, stop); messages leave as pickled frames on stdout, each
with its length before it. When stdin ends, the parent is gone and so is the load. SIGINT and SIGTERM are ignored: the
parent decides what they mean.
"""

import asyncio
import gc
import json
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from contextlib import suppress
from time import perf_counter
from typing import Any

from llmb.config.load_settings import LoadSettings
from llmb.config.serialization import build
from llmb.errors import LlmbError
from llmb.loadgen.event_loop import run_loop
from llmb.loadgen.load_worker import LoadWorker
from llmb.loadgen.pacer import LagMeter
from llmb.loadgen.request_source import RequestSource

LENGTH = struct.Struct("!I")
TICK_S = 0.02  # between two batches of records
RECORDS_PER_TICK = 100  # sent to the parent while the load runs: less than a millisecond of work
PROGRESS_TICKS = 10
PIPE_BYTES = 1 << 20


class WorkerProcess:
    """Commands in, messages out."""

    def __init__(self) -> None:
        self._worker: LoadWorker | None = None
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._buffer = b""

    async def main(self) -> None:
        """Execute the commands of the parent until it sends stop or closes the pipe."""
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._read)
        while line := await self._lines.get():
            command = json.loads(line)
            try:
                await getattr(self, f"_{command.pop('command')}")(**command)
            except LlmbError as error:
                send("error", str(error))
            except Exception as error:  # the parent reports it; a traceback in the log helps to find it
                traceback.print_exc()
                send("error", f"internal error: {type(error).__name__}: {error}")
        if self._worker is not None:
            self._worker.close()

    def _read(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            asyncio.get_running_loop().remove_reader(0)
            if self._worker is not None:
                self._worker.stop()
            self._lines.put_nowait(b"")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == b'{"command": "stop"}':  # is obeyed while a load runs
                if self._worker is not None:
                    self._worker.stop()
            else:
                self._lines.put_nowait(line)

    async def _setup(self, settings: dict[str, Any], index: int, size: int, api_key: str | None) -> None:
        parsed = build(LoadSettings, settings, "settings")
        source = RequestSource(parsed)
        self._worker = LoadWorker(asyncio.get_running_loop(), parsed, source, api_key, index, size)
        await self._worker.prepare()
        gc.collect()
        gc.freeze()
        gc.disable()  # its pauses would be latencies; there are no cycles in a request
        send("ready", source.count)

    async def _warmup(self, requests: int) -> None:
        assert self._worker is not None
        await self._worker.warm_up(requests)
        self._flush(None)
        send("warm", self._worker.fault)

    async def _start(self, start: float) -> None:
        worker = self._worker
        assert worker is not None
        loop = asyncio.get_running_loop()
        lag = LagMeter(loop)
        report = loop.create_task(self._report())
        clocks = [(perf_counter(), cpu_s())]
        loop.call_later(max(0.0, start - perf_counter()), lambda: clocks.append((perf_counter(), cpu_s())))
        await worker.run(start)
        begin, cpu = clocks[-1]  # of the load: what its head start takes is no part of it
        busy = (cpu_s() - cpu) / max(1e-9, perf_counter() - begin)
        report.cancel()
        lag.close()
        self._flush(None)
        send("progress", worker.progress)
        send(
            "end",
            {"cpu_fraction": busy, "lag_s": lag.samples_s, "fault": worker.fault, "cpu_s": cpu_s() - clocks[0][1]},
        )

    async def _report(self) -> None:
        """Send records and progress while the load runs, a few at a time."""
        assert self._worker is not None
        tick = 0
        while True:
            await asyncio.sleep(TICK_S)
            self._flush(RECORDS_PER_TICK)
            tick += 1
            if tick % PROGRESS_TICKS == 0:
                send("progress", self._worker.progress)

    def _flush(self, most: int | None) -> None:
        assert self._worker is not None
        records = self._worker.take_records(most)
        if records:
            send("records", [tuple(record) for record in records])


def send(kind: str, content: Any) -> None:
    """Write one message to the parent."""
    data = pickle.dumps((kind, content), protocol=5)
    view = memoryview(LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(1, view) :]


def cpu_s() -> float:
    """Return the CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, ValueError):  # a connection each: the usual limit of 1,024 files is soon reached
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError, ImportError, AttributeError):
        import fcntl

        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with suppress(BrokenPipeError):
        run_loop(WorkerProcess().main())
    return 0


if __name__ == "__main__":
    sys.exit(main())
