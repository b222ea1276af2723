"""What the log on stdout says beside the steps (`llmb/runtime/step_log.py`)."""

from collections.abc import Sequence

from llmb.events import TimeSpent


def time_table(spent: Sequence[TimeSpent], source: str) -> str:
    """Where the time of a profiled step went, and by what that was found."""
    rows = [f"{row.kind:<20} {row.seconds_per_step:12.6f} {row.share:7.1%}" for row in spent]
    return "\n".join([f"{'where the time went':<20} {'s per step':>12} {'share':>7}  ({source})", *rows])
