"""Protocol of the sublayers of a served model (attention, Mamba, MLP, MoE) and of their per-sequence state.

A mixer loads its weights by their names in `llmb/models`, sharded for this rank. Mixers own their KV cache or state,
which is allocated once it is known how much memory is left.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from llmb.ops.gemm.skinny_gemm import InputNorm
from llmb.ops.quant.activation_quant import Activation, QuantFormat
from llmb.serve.step_batch import StepInputs


class Mixer(Protocol):
    """A sublayer; sizes are those of this rank's shard."""

    captures_prefill: bool  # CUDA graphs can capture its prefill chunks: it takes no chunk's size from the host

    @property
    def window(self) -> int | None:
        """Sliding window of its attention, in tokens."""
        ...

    @property
    def input_format(self) -> QuantFormat:
        """Quantization format of its input."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """KV cache bytes of a token."""
        ...

    @property
    def bytes_per_slot(self) -> int:
        """State bytes of a sequence, whatever its length."""
        ...

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        """Allocate the KV cache of so many blocks and the state of so many sequences."""
        ...

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        """Return what the sublayer adds to the residual, [N, C], all-reduced over its ranks."""
        ...


@runtime_checkable
class SkinnyMixer(Mixer, Protocol):
    """A sublayer with a second path for small decode batches, of fewer and larger kernels (skinny gemms)."""

    @property
    def has_skinny_path(self) -> bool:
        """Return whether the formats of its weights support that path."""
        ...

    def forward_skinny(self, residual_NC: Tensor, norm: InputNorm, inputs: StepInputs) -> Tensor:
        """Return a new residual with the output of norm and sublayer added to it."""
        ...
