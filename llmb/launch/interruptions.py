"""Signals that ask llmb-run to end, noted down so that it can end its engine first."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruptions:
    """SIGINT, SIGTERM and SIGHUP, and others on request, while this is entered. What nohup ignored stays ignored."""

    def __init__(self, more: Iterable[int] = ()) -> None:
        self._numbers = {*ENDING, *more}
        self._seen: list[int] = []
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():  # no other thread may ask for signals
            for number in self._numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def pop(self) -> int | None:
        """The oldest not yet asked for."""
        return self._seen.pop(0) if self._seen else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen.append(number)
