"""AdamW as language models are pretrained with it, gradient clipping, and the learning rate of each step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
LR_WARMUP_STEPS = 10


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, norm weights do not."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def learning_rate(step: int, lr: float) -> float:
    """Rises in equal parts over the first steps, then stays; steps count from 1."""
    return lr * min(1.0, step / LR_WARMUP_STEPS)


def update(optimizer: torch.optim.AdamW, lr: float) -> Tensor:
    """Clip the gradients, step, drop them; returns their norm before clipping, still on the device."""
    norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_GRAD_NORM)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
