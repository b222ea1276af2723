"""AdamW hyperparameters and the learning-rate schedule of pretraining, the same for every engine that trains.

The learning rate is a function of the step alone, so a resumed run needs no saved scheduler state. Peak, warm-up and
decay are resolved before a run starts, by default as `llmb/config/lr_schedule.py` chooses them.
"""

import math

from llmb.config.spec import OutOfCore, Training

BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1  # of matrices; norm weights have none
MIN_LR_RATIO = 0.1  # of the peak learning rate, where the cosine decay ends


def learning_rate(step: int, workload: Training | OutOfCore) -> float:
    """Return the learning rate of a step, counted from 1: linear warmup, then constant or cosine decay."""
    if step < workload.lr_warmup_steps:
        return workload.lr * step / workload.lr_warmup_steps
    if workload.lr_decay_steps is None:
        return workload.lr
    progress = min(1.0, (step - workload.lr_warmup_steps) / (workload.lr_decay_steps - workload.lr_warmup_steps))
    return workload.lr * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * (1 + math.cos(math.pi * progress)) / 2)
