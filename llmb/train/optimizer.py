"""AdamW as language models are pretrained with it, gradient clipping, and the learning rate of each step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from llmb.spec import Training

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
LOWEST_LR = 0.1  # of the highest, where the cosine ends


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, norm weights do not."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def learning_rate(step: int, work: Training) -> float:
    """Rises in equal parts to its highest, then stays or falls as a cosine; steps count from 1."""
    if step < work.lr_warmup_steps:
        return work.lr * step / work.lr_warmup_steps
    if work.lr_decay_steps is None:
        return work.lr
    fallen = min(1.0, (step - work.lr_warmup_steps) / (work.lr_decay_steps - work.lr_warmup_steps))
    return work.lr * (LOWEST_LR + (1 - LOWEST_LR) * (1 + math.cos(math.pi * fallen)) / 2)


def update(optimizer: torch.optim.AdamW, lr: float) -> Tensor:
    """Clip the gradients, step, drop them; returns their norm before clipping, still on the device."""
    norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_GRAD_NORM)
    for group in optimizer.param_groups:
        group["lr"] = lr
    # Told so, the fused step changes nothing when the norm is not finite: what went wrong can still be found.
    optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
