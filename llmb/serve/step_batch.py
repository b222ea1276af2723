"""One step of the engine: a StepBatch names the tokens to compute, StepInputs holds the same as tensors.

A step mixes decodes (one token of a sequence) with prefill chunks. Decodes come first, so that one kernel can take them
and another the chunks; a step with decodes only may be the replay of a CUDA graph.

Shapes: N tokens, P sequences of the step, D half of the rotary dimension.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.serve.request import Sequence, TokenLogprobs

REJECTED = -1  # in place of the token that follows a draft token which the model does not confirm


@dataclass(slots=True, eq=False)  # thousands are created each step: frozen they take three times as long
class ScheduledChunk:
    """The tokens of a sequence that this step computes: positions start to start + num_tokens."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool  # its last token is the sequence's newest, so the step samples the next one
    draft: int = 0  # its one token is this draft token after the sequence's newest, which only the device has; 0: none

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class StepBatch:
    """The chunks that the device computes next; empty if this rank only joins the collectives of others."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    repeats_sequences: bool = False  # several chunks of one token may be of one sequence
    samples_drafts: bool = False  # of a draft model: what follows draft token i is draft token i + 1

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Leading chunks of one token."""
        return next((index for index, chunk in enumerate(self.chunks) if chunk.num_tokens > 1), len(self.chunks))

    @property
    def is_decode_only(self) -> bool:
        """Return whether every chunk is one token that samples the next."""
        return all(chunk.samples and chunk.num_tokens == 1 for chunk in self.chunks)

    @property
    def sampling_chunks(self) -> list[ScheduledChunk]:
        """The chunks that sample a token, in the order of the sampled tokens."""
        return [chunk for chunk in self.chunks if chunk.samples]


class StepHandle(Protocol):
    """A launched step that the device may still be computing."""

    @property
    def graph_size(self) -> Hashable:
        """Steps of equal size take the device equally long; None: nothing is known."""
        ...

    def is_done(self) -> bool:
        """Return whether the device has computed it; does not wait."""
        ...

    def tokens(self) -> list[int]:
        """Wait for the device and return the sampled tokens, one for each of `batch.sampling_chunks`."""
        ...

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log probabilities of the tokens whose requests ask for them, by index in `tokens`."""
        ...


class ModelRunner(Protocol):
    """Computes steps, in launch order."""

    def launch(self, batch: StepBatch) -> StepHandle:
        """Launch a step; a sequence's pending token, if it has one, is read from device memory."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepInputs(AttentionMetadata):
    """A batch as the layers see it."""

    positions_N: Tensor  # int64: position of each token in its sequence
    slot_mapping_N: Tensor  # int64: cache slot of its key and value, block * block_tokens + offset; -1: not cached
    slots_P: Tensor  # int64: row of each sequence in the per-sequence state
    cos_ND: Tensor | None = None  # fp32, of the rotary embedding; None: the model has none
    sin_ND: Tensor | None = None
    local_cos_ND: Tensor | None = None  # of layers with a sliding window, if their rotary embedding is another
    local_sin_ND: Tensor | None = None
    window_metadata: AttentionMetadata | None = None  # of those layers, if they have blocks of their own
    window_slot_mapping_N: Tensor | None = None
    repeats_sequences: bool = False  # several decodes may be of one sequence, and read each other's keys and values
