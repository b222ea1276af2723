"""Hang report: how many collectives this rank has entered, and whether it is waiting for others.

The rank that others wait for has entered fewer collectives than they have. torch's process groups count them anyway,
so this costs a run nothing. Over gloo point-to-point messages count too, and each pipeline stage has a different number
of them: there the count is only meaningful together with who waits.
"""

import sys
import threading
import time
from types import FrameType

from llmb.events import HangReport

WAITING_FILES = ("/torch/distributed/", "/llmb/train/step_timer.py")  # source files of calls that wait for others


def hang_report(rank: int) -> HangReport:
    """Return the report of this rank; called from a thread other than the one that trains."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return HangReport(time=time.time(), rank=rank, collectives=collectives_entered(), waiting=_is_waiting(frame))


def collectives_entered() -> dict[str, int]:
    """Return the count of each process group by its name and ranks; empty without torch or with one process."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    return {
        f"{group.group_name} {','.join(map(str, members))}": group._get_sequence_number_for_group()
        for group, members in ((group, sorted(ranks)) for group, ranks in world.pg_group_ranks.items())
        if len(members) > 1 and isinstance(group, dist.ProcessGroup)  # else this rank is not in it
    }


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether the innermost frames, as long as they are torch's, are in a file that waits for other ranks."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(path in file for path in WAITING_FILES):
            return True
        if "/torch/" not in file:
            return False
        frame = frame.f_back
    return False
