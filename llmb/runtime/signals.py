"""An interrupted run ends with a named status, at once, even in the middle of a long step; a hung one says where.

Python runs signal handlers only between two of its own instructions, which may be minutes away while the main thread
waits for a device. The interpreter's wake-up pipe is written immediately, so a thread waits on that pipe, writes the
last event and ends the process with the exit code shells expect, 128 + signal.

SIGUSR2 asks where this rank is. The stack of the main thread goes to stderr at once, even from inside a library; the
thread then adds how far the rank has come, unless somebody keeps the interpreter's lock for himself.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback

from llmb.config.spec import Status
from llmb.events import WHERE_SIGNAL
from llmb.runtime.hang_report import whereabouts
from llmb.runtime.recorder import Record

STATUSES: dict[int, Status] = {
    signal.SIGTERM: "incomplete",
    signal.SIGINT: "incomplete",
    signal.SIGUSR1: "timeout",  # a scheduler's warning that the time limit is near
}


def heed_signals(engine: str, record: Record) -> None:
    """From now on SIGTERM, SIGINT and SIGUSR1 end the run through `record`, and SIGUSR2 is answered there."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (*STATUSES, WHERE_SIGNAL):
        signal.signal(number, lambda _number, _frame: None)  # a handler must exist for the pipe to be written
    faulthandler.register(WHERE_SIGNAL, all_threads=False, chain=True)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_wait, args=(reader, engine, record), daemon=True).start()


def _answer(record: Record) -> None:
    try:
        record.add(whereabouts(record.rank))
    except Exception as error:  # whatever it is, this thread must live on: nobody else ends the run
        traceback.print_exception(error)


def _wait(reader: int, engine: str, record: Record) -> None:
    number = os.read(reader, 1)[0]
    while number not in STATUSES:
        if number == WHERE_SIGNAL:
            _answer(record)
        number = os.read(reader, 1)[0]
    try:
        reason = record.interrupt(STATUSES[number], signal.Signals(number).name)
        os.write(sys.stderr.fileno(), f"{engine}: {reason}\n".encode())
    finally:
        os._exit(128 + number)
