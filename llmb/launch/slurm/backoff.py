"""Polling delay with exponential backoff: hundreds of watchers must not overload Slurm's controller.

backoff = Backoff()
while running:
    sleep(backoff.next_delay_s(snapshot))    # 1 s while things change, then longer and longer up to a minute
"""

from typing import Any

SHORTEST_S = 1.0
LONGEST_S = 60.0
GROWTH = 1.5


class Backoff:
    """Delay between polls: grows while nothing changes, resets when something does."""

    def __init__(self, shortest_s: float = SHORTEST_S, longest_s: float = LONGEST_S):
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._delay_s: float | None = None
        self._last_snapshot: Any = None

    def next_delay_s(self, snapshot: Any) -> float:
        """Return the delay after this snapshot; one equal to the last means that nothing has changed."""
        if self._delay_s is None or snapshot != self._last_snapshot:
            self._delay_s = self._shortest_s
        else:
            self._delay_s = min(self._delay_s * GROWTH, self._longest_s)
        self._last_snapshot = snapshot
        return self._delay_s
