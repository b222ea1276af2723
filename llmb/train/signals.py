"""An interrupted run ends with a named status, at once, even in the middle of a long step.

Python runs signal handlers only between two of its own instructions, which may be minutes away while the main thread
waits for a device. The interpreter's wake-up pipe is written immediately, so a thread waits on that pipe, writes the
last event and ends the process with the exit code shells expect, 128 + signal.
"""

import os
import signal
import sys
import threading

from llmb.spec import Status
from llmb.train.record import Record

STATUSES: dict[int, Status] = {
    signal.SIGTERM: "incomplete",
    signal.SIGINT: "incomplete",
    signal.SIGUSR1: "timeout",  # a scheduler's warning that the time limit is near
}


def end_on_signal(record: Record) -> None:
    """From now on SIGTERM, SIGINT and SIGUSR1 end the run through `record`."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in STATUSES:
        signal.signal(number, lambda _number, _frame: None)  # a handler must exist for the pipe to be written
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_wait, args=(reader, record), daemon=True).start()


def _wait(reader: int, record: Record) -> None:
    number = os.read(reader, 1)[0]
    while number not in STATUSES:
        number = os.read(reader, 1)[0]
    reason = f"interrupted by {signal.Signals(number).name} after step {record.last_step}"
    try:
        record.end(STATUSES[number], reason)
        os.write(sys.stderr.fileno(), f"llmb.train: {reason}\n".encode())
    finally:
        os._exit(128 + number)
