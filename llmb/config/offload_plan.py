"""How one GPU goes through an optimizer step of a Llama that it cannot hold: made on the desk, followed by the device.

A step's sequences are cut into groups, rounds and chunks. A long sequence is a group of several chunks; short ones
share a group of one chunk. A round takes some groups forward through all layers and back again. The weights are cut
into units of equal size: the layers' blocks, and parts of the embedding and of the head. Of the weights, gradients and
optimizer state of all units some stay on the device for good (`resident_*`) and the others pass through buffers there
(`*_blocks`). Of what a (layer, chunk) computes, its level says what is kept for the way back:

    F  everything                       nothing is computed again
    A  input, keys and values, attention    the queries' and output's products, the MLP's first
    I  input, keys and values           these and the attention

The last of them stay on the device as far as there are slots, the others wait in host memory.
"""

from dataclasses import dataclass
from typing import Literal

Update = Literal["master", "stochastic", "nearest"]
Level = Literal["F", "A", "I"]
FULL, ATTENTION, INPUT = "F", "A", "I"
UPDATES: tuple[Update, ...] = ("master", "stochastic", "nearest")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every choice of an out-of-core run."""

    dtype: Literal["fp32", "bf16", "fp8"]
    seqlen: int
    gbs: int  # sequences an optimizer step
    chunk_tokens: int  # most that are computed at once; the last chunk of a sequence may have fewer
    seqs_per_group: int  # that share a chunk; 1 where a sequence has several chunks
    groups_per_round: int
    loss_tokens: int  # of a chunk whose logits exist at once
    update: Update  # how weights take small changes: fp32 master weights, or bf16 rounded stochastically or to nearest
    update_at: Literal["forward", "backward"]  # of the next step, when gradients can be clipped, or right behind them
    resident_params: int  # units
    resident_grads: int
    resident_states: int
    param_blocks: int  # buffers that the other units pass through; none where all are resident
    grad_blocks: int
    state_blocks: int
    inp_slots: int  # buffers for what (layer, chunk)s keep, by part
    kv_slots: int
    attn_slots: int
    rest_slots: int
    levels: str  # a letter for each chunk of a whole round, layer by layer

    @property
    def groups(self) -> int:
        """Of a step; the last may have fewer sequences."""
        return -(-self.gbs // self.seqs_per_group)

    @property
    def rounds(self) -> int:
        """Of a step; the last may have fewer groups."""
        return -(-self.groups // self.groups_per_round)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients wait for a later round, or for the next step; otherwise each is used up when it is done."""
        return self.rounds > 1 or self.update_at == "forward"

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
