"""AdamW over small tensors, all in one fused kernel per group.

`torch.optim.AdamW(fused=True)` without its class, whose construction imports torch's compiler: 1.4 s of CPU time in
every process.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from llmb.ops.gemm.weight_gradient import existing_gradient


class FusedAdamW:
    """AdamW whose parameters are updated from their `grad`, with weight decay for matrices only."""

    def __init__(self, parameters: Sequence[Tensor], betas: tuple[float, float], eps: float, weight_decay: float):
        self._betas, self._eps = betas, eps
        self._groups = (
            ([weight for weight in parameters if weight.ndim > 1], weight_decay),
            ([weight for weight in parameters if weight.ndim == 1], 0.0),
        )
        self.state: dict[Tensor, dict[str, Tensor]] = {}  # names as in torch.optim.AdamW

    def init_state(self) -> None:
        """Allocate missing state, as zeros."""
        for weights, _ in self._groups:
            for weight in weights:
                if weight not in self.state:
                    step = torch.zeros((), dtype=torch.float32, device=weight.device)
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[weight] = {"step": step, **moments}

    def step(self, lr: float, scale: Tensor, discard: Tensor) -> None:
        """Update with gradients divided by `scale`, both on the device; where `discard` is 1.0 nothing changes."""
        self.init_state()
        for weights, weight_decay in self._groups:
            states = [self.state[weight] for weight in weights]
            adamw(
                weights,
                [existing_gradient(weight) for weight in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=scale,
                found_inf=discard,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr,
                weight_decay=weight_decay,
                eps=self._eps,
                maximize=False,
            )
