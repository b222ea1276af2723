"""What a step comes to: its loss and the norm of its gradients, added up on the device and read much later.

    figures.begin()
    figures.add_losses(losses_N); figures.add_gradients(tensors)
    figures.finish(counted, into)               # into: the host's, where they are once the device gets there

From them comes the factor that gradients are multiplied with. One that is no number says that something is not finite,
and with it nothing is updated.
"""

import torch
from torch import Tensor


class Figures:
    """Of the step that is being computed; the factor is that of the step before until `finish`."""

    def __init__(self, device: torch.device, clip: float | None):
        self.clip = clip
        self._loss, self._squares, self.factor = torch.zeros(3, device=device).unbind()

    def begin(self) -> None:
        """A step begins."""
        self._loss.zero_()
        self._squares.zero_()

    def add_losses(self, losses_N: Tensor) -> None:
        """Of some tokens."""
        self._loss += losses_N.sum()

    def add_gradients(self, gradients: list[Tensor]) -> None:
        """Complete ones."""
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        self._squares += torch.stack(norms).square_().sum()

    def finish(self, counted: int, into: Tensor) -> None:
        """The step is computed: mean loss and norm, and the factor of its update."""
        norm = self._squares.sqrt()
        into.copy_(torch.stack((self._loss / counted, norm)), non_blocking=True)
        unlimited = self._sound(norm + self._loss)
        limited = unlimited if self.clip is None else (self.clip / (norm + 1e-6)).clamp_(max=1.0) * unlimited
        self.factor.copy_(limited)

    def factor_so_far(self) -> Tensor:
        """For updates before the step is done: 1, as long as all that is known is finite."""
        return self._sound(self._squares + self._loss)

    def _sound(self, figure: Tensor) -> Tensor:
        """1 if a figure is finite, else no number."""
        return figure * 0.0 + 1.0
