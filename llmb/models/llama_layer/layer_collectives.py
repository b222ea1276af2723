"""Collectives inside a Llama layer whose weights or tokens are divided among ranks.

Process groups are the caller's (`llmb/train/parallel`); None in place of one of these means one rank.
"""

from typing import Protocol

from torch import Tensor


class TensorParallel(Protocol):
    """Tensor parallelism with sequence parallelism: inside attention and MLP a rank has all N tokens and its heads or
    channels, outside all channels of its S tokens."""

    sequences: int  # whose tokens these are, the same number from each on every rank
    ranks: int

    def gather(self, x_SC: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order that attention takes; any dtype."""

    def reduce_scatter(self, partial_NC: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks."""


class ContextParallel(Protocol):
    """Attention of the N tokens of a rank to all T tokens of its sequences, whose keys and values are gathered."""

    def attention_forward(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, sequences: int, scale: float, key_block: int,
        window: int | None, softcap: float | None, /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return output and log-sum-exp, and the gathered keys and values."""

    def attention_backward(
        self, dout_NHD: Tensor, q_NHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
        sequences: int, scale: float, key_block: int, window: int | None, softcap: float | None, /,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of this rank's queries, keys and values."""
