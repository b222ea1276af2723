"""Signal handling: an interrupted run ends at once with a named status, a hung one writes a hang report.

Python runs signal handlers only between two bytecode instructions, which may be minutes away while the main thread
waits for a device. The interpreter's wake-up pipe is written immediately, so a thread waits on that pipe, writes the
last event and exits with the code that shells expect, 128 + signal.

SIGUSR2 requests a hang report. The stack of the main thread is printed to stderr at once, even from inside a library;
the thread then records the collectives entered, unless another thread holds the GIL.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback

from llmb.config.spec import Status
from llmb.events import HANG_REPORT_SIGNAL
from llmb.runtime.hang_report import hang_report
from llmb.runtime.recorder import EventRecorder

STATUSES: dict[int, Status] = {
    signal.SIGTERM: "incomplete",
    signal.SIGINT: "incomplete",
    signal.SIGUSR1: "timeout",  # sent by a scheduler when the time limit is near
}


def install_signal_handlers(engine: str, recorder: EventRecorder) -> None:
    """End the run through `recorder` on SIGTERM, SIGINT and SIGUSR1; record a hang report on SIGUSR2."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (*STATUSES, HANG_REPORT_SIGNAL):
        signal.signal(number, lambda _number, _frame: None)  # without a handler the pipe is not written
    faulthandler.register(HANG_REPORT_SIGNAL, all_threads=False, chain=True)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_handle_signals, args=(reader, engine, recorder), daemon=True).start()


def _record_hang_report(recorder: EventRecorder) -> None:
    try:
        recorder.add(hang_report(recorder.rank))
    except Exception as error:  # this thread must survive any error: only it ends the run
        traceback.print_exception(error)


def _handle_signals(reader: int, engine: str, recorder: EventRecorder) -> None:
    number = os.read(reader, 1)[0]
    while number not in STATUSES:
        if number == HANG_REPORT_SIGNAL:
            _record_hang_report(recorder)
        number = os.read(reader, 1)[0]
    try:
        reason = recorder.interrupt(STATUSES[number], signal.Signals(number).name)
        os.write(sys.stderr.fileno(), f"{engine}: {reason}\n".encode())
    finally:
        os._exit(128 + number)
