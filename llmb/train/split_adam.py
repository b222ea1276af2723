"""AdamW over split master weights: one fused pass per weight, which reads and writes the fp32 value exactly.

State in bf16, moments or weights without low bits, uses stochastic rounding (`llmb/ops/optim/adam.py`): an update is
often smaller than the spacing of bf16, and rounding to nearest would discard it every time.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from llmb.ops.optim.adam import adam_update
from llmb.runtime.adamw_settings import BETAS, EPS, WEIGHT_DECAY
from llmb.train.split_weights import SplitWeight

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")  # those of torch.optim.AdamW


class SplitAdamW:
    """AdamW over all split weights of a rank."""

    def __init__(self, weights: Mapping[str, SplitWeight], moments: torch.dtype, seed: int):
        self.weights, self._moments, self._seed = weights, moments, seed
        self.steps = 0  # number of updates so far
        self._state: dict[str, dict[str, Tensor]] = {}

    def update(self, gradients: Mapping[str, Tensor], lr: float, factor: Tensor) -> None:
        """Update all weights; `factor` scales the gradients, and nothing changes if it is not finite."""
        self.init_state()
        self.steps += 1
        for number, (name, weight) in enumerate(self.weights.items()):
            m, v = (self._state[name][kind].view(-1) for kind in MOMENT_NAMES)
            low = None if weight.low is None else weight.low.view(-1)
            adam_update(
                weight.detach().view(-1), gradients[name].reshape(-1), m, v, low, lr=lr,
                beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, step=self.steps, factor=factor,
                rounding="nearest" if self._moments == torch.float32 and low is not None else "stochastic",
                seed=((self._seed << 24) + self.steps << 16) + number,
            )  # fmt: skip

    def init_state(self) -> None:
        """Allocate missing moments, as zeros."""
        for name, weight in self.weights.items():
            if name not in self._state:
                self._state[name] = {kind: torch.zeros_like(weight, dtype=self._moments) for kind in MOMENT_NAMES}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state by the names of torch.optim.AdamW; the moments are views to load into."""
        return {name: {"step": torch.tensor(float(self.steps)), **moments} for name, moments in self._state.items()}

    def restore(self, name: str, weight_fp32: Tensor, steps: Tensor) -> None:
        """Set a weight and the step count from a checkpoint; its moments are loaded in place."""
        self.weights[name].set_fp32(weight_fp32)
        self.steps = int(steps)
