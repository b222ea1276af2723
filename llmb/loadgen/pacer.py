"""Timers of tens of microseconds on an event loop, whose own are rounded to milliseconds.

    pacer = Pacer(loop, send_due)      # calls send_due() at or after the time that was set
    pacer.set(deadline)                # in seconds of time.perf_counter()

A Linux timerfd is read by the loop like a socket; elsewhere the loop's own timer is used.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

CLOCK_MONOTONIC = 1  # the clock of perf_counter on Linux
TFD_NONBLOCK = 0o4000
TFD_CLOEXEC = 0o2000000
TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


def _load_libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _ = libc.timerfd_create, libc.timerfd_settime
        return libc
    except (OSError, AttributeError):
        return None


class Pacer:
    """One timer with one callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]):
        self._loop, self._callback = loop, callback
        self._handle: asyncio.TimerHandle | None = None
        self._libc = _load_libc()
        self._timer = (
            -1 if self._libc is None else self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        )
        if self._timer >= 0:
            loop.add_reader(self._timer, self._expired)

    def set(self, deadline: float) -> None:
        """Replace the deadline; one in the past expires at once."""
        if self._timer < 0 or self._libc is None:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, deadline - perf_counter()), self._callback)
            return
        nanoseconds = max(1, int(deadline * 1e9))  # zero would disarm it
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 1_000_000_000)))
        self._libc.timerfd_settime(self._timer, TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def close(self) -> None:
        """Release the timer."""
        if self._handle is not None:
            self._handle.cancel()
        if self._timer >= 0:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = -1

    def _expired(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._timer, 8)
        self._callback()


class LagMeter:
    """Samples how late the event loop handles what is ready: the error of every time stamp of a read."""

    INTERVAL_S = 0.01
    MAX_SAMPLES = 100_000

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.samples_s: list[float] = []
        self._pacer = Pacer(loop, self._tick)
        self._next = perf_counter() + self.INTERVAL_S
        self._pacer.set(self._next)

    def _tick(self) -> None:
        now = perf_counter()
        if len(self.samples_s) < self.MAX_SAMPLES:
            self.samples_s.append(max(0.0, now - self._next))
        self._next = max(self._next + self.INTERVAL_S, now)
        self._pacer.set(self._next)

    def close(self) -> None:
        self._pacer.close()
