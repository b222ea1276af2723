"""How far this rank has come, told when nothing moves any more: the rank that others wait for has entered fewer
collectives than they have. The counts are those that torch's process groups keep anyway, so a run pays nothing.

Over gloo messages between two ranks count too, and each stage of a pipeline has another number of them: there the count
only tells together with who waits.
"""

import sys
import threading
import time
from types import FrameType

from llmb.events import Whereabouts

WAITS = ("/torch/distributed/", "/llmb/train/step_timer.py")  # where calls come from that wait for others


def whereabouts(rank: int) -> Whereabouts:
    """Asked by another thread than the one that trains."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return Whereabouts(time=time.time(), rank=rank, collectives=collectives_entered(), waiting=_waits(frame))


def collectives_entered() -> dict[str, int]:
    """By name and members of each group; none where torch is not even imported, or there is one process."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    return {
        f"{group.group_name} {','.join(map(str, members))}": group._get_sequence_number_for_group()
        for group, members in ((group, sorted(ranks)) for group, ranks in world.pg_group_ranks.items())
        if len(members) > 1
    }


def _waits(frame: FrameType | None) -> bool:
    """Whether the innermost calls, as far as they are torch's own, come from where one waits."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(place in file for place in WAITS):
            return True
        if "/torch/" not in file:
            return False
        frame = frame.f_back
    return False
