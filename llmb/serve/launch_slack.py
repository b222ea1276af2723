"""Time that the host can wait for requests before it has to schedule the next step.

While the device computes a step, the host schedules and launches the next. A request that arrives before joins that
step; one that arrives later waits for a whole step more. So a server schedules as late as the device allows: the time
that steps of the running one's size have taken at least, less the time that launching a step has taken at most, both of
the last few steps. Steps that are no CUDA graphs have no known duration and leave no slack.
"""

import time
from collections import defaultdict, deque
from collections.abc import Hashable

RECENT_LAUNCHES, RECENT_STEPS = 8, 3
MARGIN_S = 0.5e-3  # for the wake-up of the host, and for commands that came with the last of the wait
MARGIN_FRACTION = 0.05  # of a step


class LaunchSlack:
    """Durations of recent steps, by size."""

    def __init__(self) -> None:
        self._host_s: deque[float] = deque(maxlen=RECENT_LAUNCHES)
        self._device_s: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))
        self._read_at: float | None = None  # when the device began the step it computes now
        self._running: Hashable = None  # its size

    def on_launch(self, started: float) -> None:
        """Note that a step was launched, which the host began to schedule at this time."""
        self._host_s.append(time.monotonic() - started)

    def on_read(self, size: Hashable, waited: bool, running: Hashable) -> None:
        """Note that the device has ended a step and begins another one, both of a size.

        The host waited for it, or came late: then the estimate of its duration was wrong.
        """
        now, began = time.monotonic(), self._read_at
        self._read_at, self._running = (now if waited else None), running
        if size is None:
            return
        if not waited:
            self._device_s[size].clear()
        elif began is not None:
            self._device_s[size].append(now - began)

    def seconds(self) -> float:
        """Return how long the next step can wait while the device computes one; 0 if that is not known."""
        if self._read_at is None or self._running is None:
            return 0.0
        durations = self._device_s[self._running]
        if len(durations) < RECENT_STEPS:
            return 0.0
        step_s = min(durations) * (1 - MARGIN_FRACTION)
        return max(0.0, self._read_at + step_s - max(self._host_s) - MARGIN_S - time.monotonic())
