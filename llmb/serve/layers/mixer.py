"""What every block of a served model is: something that mixes a step's tokens, and what it keeps for each sequence.

A layer's block is taken from the weights of `llmb/models` under the same names, cut to this rank's share. Blocks own
their part of the cache, which is allocated once it is known how much memory is left.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from llmb.ops.gemm.skinny_gemm import Norm
from llmb.ops.quant.activation_quant import Activation, Form
from llmb.serve.step_batch import Inputs


class Mixer(Protocol):
    """One block. Everything is about this rank's share of it."""

    @property
    def form(self) -> Form:
        """How it wants its input."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Of the cache, for each token of a sequence."""
        ...

    @property
    def bytes_per_slot(self) -> int:
        """Of state, for each sequence whatever its length."""
        ...

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        """Make room for so many blocks of tokens and so many sequences."""
        ...

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        """What the block adds to the stream, [N, C]: already summed over the ranks that share its weights."""
        ...


@runtime_checkable
class ThinMixer(Mixer, Protocol):
    """A block with a second way for steps in which a handful of sequences generate: fewer kernels, larger ones."""

    @property
    def has_thin(self) -> bool:
        """Whether the formats of its weights allow it."""
        ...

    def thin(self, stream_NC: Tensor, norm: Norm, inputs: Inputs) -> Tensor:
        """The stream with what the block adds to it, its norm included; what was given stays as it is."""
        ...
