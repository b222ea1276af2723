"""Plan of one GPU's optimizer step for a Llama that does not fit its memory, executed by the out-of-core engine.

A step's sequences are divided into groups, rounds and chunks. A chunk is computed at once: a long sequence is a group
of several chunks; short ones share a group of one chunk. A round takes some groups forward through all layers and
backward again. The weights are divided into parameter buckets of equal size: the layers, and shards of the embedding
and of the head. Of the weights, gradients and optimizer state of all buckets some are resident on the device
(`resident_*`) and the others pass through buffers there (`*_blocks`). The save level of a (layer, chunk) says which
activations are saved for backward, and what is recomputed:

    F  everything                               nothing
    A  input, keys and values, attention        projections of queries and output, gate and up
    I  input, keys and values                   these and the attention

The last of them stay on the device as far as there are slots, the others are in host memory. Weights and optimizer
state that host memory does not hold live on disk (`disk_*`) and pass through staging buffers of the host.

With LoRA the weights are frozen: buckets have neither gradients nor optimizer state, nothing of them is written back,
and the adapters with all that belongs to them are on the device, outside of any bucket.
"""

from dataclasses import dataclass
from typing import Literal

Update = Literal["master", "stochastic", "nearest"]
Level = Literal["F", "A", "I"]
FULL, ATTENTION, INPUT = "F", "A", "I"
UPDATES: tuple[Update, ...] = ("master", "stochastic", "nearest")
FrozenDtype = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters of frozen weights: y = x W^T + alpha / rank * (x A^T) B^T."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # projections with adapters, by their Hugging Face names
    # Of the frozen weights. fp8: matrices in e4m3 with a scale per output channel, widened before their GEMMs.
    frozen_weights: FrozenDtype

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every choice of an out-of-core run."""

    dtype: Literal["fp32", "bf16", "fp8"]
    seqlen: int
    gbs: int  # sequences per optimizer step
    chunk_tokens: int  # computed at once; the last chunk of a sequence may have fewer
    seqs_per_group: int  # sharing a chunk; 1 where a sequence has several chunks
    groups_per_round: int
    loss_tokens: int  # per loss chunk, whose logits exist at once
    update: Update  # fp32 master weights, or bf16 with stochastic rounding or rounding to nearest
    update_at: Literal["forward", "backward"]  # next step's, so that gradients can be clipped, or this one's
    resident_params: int  # buckets
    resident_grads: int
    resident_states: int
    param_blocks: int  # buffers that the other buckets pass through; none where all are resident
    grad_blocks: int
    state_blocks: int
    inp_slots: int  # buffers for saved activations of (layer, chunk)s, by kind
    kv_slots: int
    attn_slots: int
    rest_slots: int
    levels: str  # a letter for each chunk of a whole round, layer by layer
    fp8_recipe: Literal["tensorwise_delayed", "rowwise", "blockwise"] | None = None  # none: no fp8, or the first
    disk_params: int = 0  # buckets that live on disk; none of them is resident
    disk_states: int = 0
    lora: Lora | None = None  # none: all weights are trained

    @property
    def groups(self) -> int:
        """Groups of a step; the last may have fewer sequences."""
        return -(-self.gbs // self.seqs_per_group)

    @property
    def rounds(self) -> int:
        """Rounds of a step; the last may have fewer groups."""
        return -(-self.groups // self.groups_per_round)

    @property
    def keeps_gradients(self) -> bool:
        """Return whether gradients are kept for a later round or step; otherwise each is consumed when complete."""
        return self.lora is None and (self.rounds > 1 or self.update_at == "forward")

    @property
    def recipe(self) -> str | None:
        """Return the fp8 recipe by name; None: no fp8."""
        return self.fp8_recipe or ("tensorwise_delayed" if self.dtype == "fp8" else None)

    @property
    def widens_weights(self) -> bool:
        """Return whether frozen weights are in fp8, so that GEMMs take a widened copy."""
        return self.lora is not None and self.lora.frozen_weights == "fp8"

    @property
    def uses_disk(self) -> bool:
        return self.disk_params + self.disk_states > 0

    @property
    def chunks_per_group(self) -> int:
        return -(-self.seqlen * self.seqs_per_group // self.chunk_tokens)

    @property
    def chunks_per_round(self) -> int:
        return self.groups_per_round * self.chunks_per_group

    @property
    def group_tokens(self) -> int:
        return self.seqlen * self.seqs_per_group

    @property
    def step_tokens(self) -> int:
        return self.gbs * self.seqlen


@dataclass(frozen=True, kw_only=True)
class PlanConstraints:
    """Choices that the user fixed; None: the planner chooses."""

    dtype: Literal["fp32", "bf16", "fp8"]
    fp8_recipe: Literal["tensorwise_delayed", "rowwise", "blockwise"] | None = None  # none: no fp8, or the first
    seqlen: int
    host_gib: float
    device_gib: float
    disk_gib: float = 0.0  # 0: no disk
    update: Update = "stochastic"
    clip: float | None = None
    gbs: int | None = None
    chunk_tokens: int | None = None
    seqs_per_round: int | None = None
    resident_params: int | None = None
    resident_grads: int | None = None
    resident_states: int | None = None
    activation_slots: int | None = None  # fully saved (layer, chunk)s that stay on the device
    full_saves: int | None = None  # of those on the host
    attention_saves: int | None = None
    lora: Lora | None = None
