"""AdamW over weights in two halves: one pass over each, which reads and writes the weight exactly.

What is kept in bf16, moments or weights without their lower half, is rounded at random so that on average nothing is
lost (`llmb/ops/optim/adam.py`): a step moves it by less than a bf16 number can tell, and rounding to the nearest would
lose that each time.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from llmb.ops.optim.adam import adam_update
from llmb.runtime.adamw_defaults import BETAS, EPS, WEIGHT_DECAY
from llmb.train.split_weights import HalvedWeight

NAMES = ("exp_avg", "exp_avg_sq")  # of the moments, as torch's own optimizer calls them


class HalvedAdam:
    """Of all halved weights of a rank."""

    def __init__(self, weights: Mapping[str, HalvedWeight], moments: torch.dtype, seed: int):
        self.weights, self._moments, self._seed = weights, moments, seed
        self.steps = 0  # taken so far
        self._state: dict[str, dict[str, Tensor]] = {}

    def update(self, gradients: Mapping[str, Tensor], lr: float, factor: Tensor) -> None:
        """One step; `factor` scales the gradients, and if it is not finite nothing changes."""
        self.make_state()
        self.steps += 1
        for number, (name, weight) in enumerate(self.weights.items()):
            m, v = (self._state[name][kind].view(-1) for kind in NAMES)
            low = None if weight.low is None else weight.low.view(-1)
            adam_update(
                weight.detach().view(-1), gradients[name].reshape(-1), m, v, low, lr=lr,
                beta1=BETAS[0], beta2=BETAS[1], eps=EPS, decay=WEIGHT_DECAY, step=self.steps, factor=factor,
                rounding="nearest" if self._moments == torch.float32 and low is not None else "stochastic",
                seed=((self._seed << 24) + self.steps << 16) + number,
            )  # fmt: skip

    def make_state(self) -> None:
        """Moments of weights that were never updated, where they are missing."""
        for name, weight in self.weights.items():
            if name not in self._state:
                self._state[name] = {kind: torch.zeros_like(weight, dtype=self._moments) for kind in NAMES}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By the names that torch's own optimizer gives; what is read into the moments is theirs at once."""
        return {name: {"step": torch.tensor(float(self.steps)), **kept} for name, kept in self._state.items()}

    def restore(self, name: str, whole: Tensor, steps: Tensor) -> None:
        """Go on with this weight, behind so many steps; its moments have been read."""
        self.weights[name].set(whole)
        self.steps = int(steps)
