"""AdamW of replicated parameters by torch's fused kernel.

torch.optim.AdamW calls the same kernel, but imports torch's compiler first: two seconds of every start.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from llmb.runtime.adamw_settings import BETAS, EPS, WEIGHT_DECAY


class FusedAdamW:
    """AdamW with weight decay for matrices only; `state` has the names of torch.optim.AdamW's."""

    def __init__(self, weights: Iterable[nn.Parameter]):
        self._decayed: list[nn.Parameter] = []
        self._others: list[nn.Parameter] = []
        for weight in weights:
            (self._decayed if weight.ndim > 1 else self._others).append(weight)
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update the weights that have gradients, which the kernel divides by `grad_scale` as it reads them.

        Where `found_inf` is 1, on the device, nothing changes.
        """
        self._update(self._decayed, WEIGHT_DECAY, lr, grad_scale, found_inf)
        self._update(self._others, 0.0, lr, grad_scale, found_inf)

    def _update(
        self,
        weights: list[nn.Parameter],
        weight_decay: float,
        lr: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        gradients = {weight: weight.grad for weight in weights if weight.grad is not None}
        if not gradients:
            return
        states = [self._state(weight) for weight in gradients]
        steps, m, v = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [*gradients], [*gradients.values()], m, v, [], steps,
            lr=lr, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=weight_decay,
            amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _state(self, weight: nn.Parameter) -> dict[str, Tensor]:
        if weight not in self.state:
            self.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        return self.state[weight]
