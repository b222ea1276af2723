"""How long the host can wait for requests before it has to schedule the next step.

While the device computes a step, the host schedules and launches the next. A request that arrives before joins that
step; one that arrives later waits for a whole step more. So a server schedules as late as the device allows: the time a
step of decodes takes at least, less the time the host needs to launch a step at most, both of the last few steps.
"""

import time
from collections import deque

RECENT_STEPS = 8
MARGIN_S = 0.5e-3  # for the wake-up of the host, and for commands that came with the last of the wait
MARGIN_FRACTION = 0.05  # of a step


class LaunchSlack:
    """Durations of recent steps. Without steps of decodes on a busy device, none is known and there is no slack."""

    def __init__(self) -> None:
        self._host_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._device_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._read_at: float | None = None  # when the device began the step it computes now

    def on_launch(self, started: float) -> None:
        """Note that a step was launched, which the host began to schedule at this time."""
        self._host_s.append(time.monotonic() - started)

    def on_read(self, waited: bool, decode_only: bool) -> None:
        """Note that the device has ended a step; the host waited for it, or came late, so that estimates were wrong."""
        now = time.monotonic()
        if not waited:
            self._read_at = None
            self._device_s.clear()
            return
        if decode_only and self._read_at is not None:
            self._device_s.append(now - self._read_at)
        self._read_at = now

    def seconds(self) -> float:
        """Return how long the next step can wait while the device computes one; 0 if that is not known."""
        if self._read_at is None or len(self._device_s) < RECENT_STEPS:
            return 0.0
        step_s = min(self._device_s) * (1 - MARGIN_FRACTION)
        return max(0.0, self._read_at + step_s - max(self._host_s) - MARGIN_S - time.monotonic())
