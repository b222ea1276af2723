"""How long to wait before asking Slurm again: hundreds of watchers must not weigh on its controller.

backoff = Backoff()
while going:
    sleep(backoff.after(snapshot))    # 1 s while things change, then longer and longer up to a minute
"""

from typing import Any

SHORTEST_S = 1.0
LONGEST_S = 60.0
GROWTH = 1.5


class Backoff:
    """The next delay; it grows while nothing changes and is short again when something does."""

    def __init__(self, shortest_s: float = SHORTEST_S, longest_s: float = LONGEST_S):
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._delay_s: float | None = None
        self._seen: Any = None

    def after(self, seen: Any) -> float:
        """The delay after having seen this; equal to what was seen before: nothing has changed."""
        if self._delay_s is None or seen != self._seen:
            self._delay_s = self._shortest_s
        else:
            self._delay_s = min(self._delay_s * GROWTH, self._longest_s)
        self._seen = seen
        return self._delay_s
