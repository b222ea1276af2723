"""The learning rate of each step: a function of the step's number, so a run that is resumed needs nothing kept."""

import math
from typing import Protocol

LOWEST_LR = 0.1  # of the highest, where the cosine ends


class Schedule(Protocol):
    """What a workload says of it; see the fields of spec.Training."""

    @property
    def lr(self) -> float: ...
    @property
    def lr_warmup_steps(self) -> int: ...
    @property
    def lr_decay_steps(self) -> int | None: ...


def learning_rate(step: int, work: Schedule) -> float:
    """Rises in equal parts to its highest, then stays or falls as a cosine; steps count from 1."""
    if step < work.lr_warmup_steps:
        return work.lr * step / work.lr_warmup_steps
    if work.lr_decay_steps is None:
        return work.lr
    fallen = min(1.0, (step - work.lr_warmup_steps) / (work.lr_decay_steps - work.lr_warmup_steps))
    return work.lr * (LOWEST_LR + (1 - LOWEST_LR) * (1 + math.cos(math.pi * fallen)) / 2)
