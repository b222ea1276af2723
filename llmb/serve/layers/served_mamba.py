"""The Mamba-2 mixer of a served model: `llmb/models/mamba2.py` with a state for each sequence instead of its past.

What a sequence leaves behind has one size however long it is: the last inputs of the convolution and the state of the
recurrence, in the sequence's slot. A step's rows of one token go through one pair of kernels, chunks of prompts one
after the other through those of training. Weights lie group after group, so a rank's share is some whole groups.

Shapes: N tokens of a step, T of one part, G groups, H heads, P width of a head, K inputs kept for the convolution;
C channels, of a group after G and of all otherwise.
"""

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.mamba2 import SHORTEST_STEP, conv_sections, inward_sections, mamba_of
from llmb.ops.mamba.causal_conv1d import causal_conv
from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, Rows, mamba_step, time_steps
from llmb.ops.mamba.ssd import ssd_from
from llmb.ops.norm.gated_norm import gated_norm
from llmb.ops.quant.activation_quant import Activation, Form, in_form
from llmb.serve.layers.served_linear import Format, linear
from llmb.serve.rank_groups import Group
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, Weights


class StatefulMamba:
    """One Mamba block and the states of its sequences."""

    bytes_per_token = 0

    def __init__(self, weights: Weights, name: str, model: Model, format: Format, dtype: torch.dtype, group: Group):
        self.shape, self.eps, self.dtype, self.group = mamba_of(model), model.norm_eps, dtype, group
        self.groups, self.heads = self.shape.groups // group.size, self.shape.heads // group.size
        cut = Cut(0, group.index, group.size)

        def exact(of: str) -> Tensor:
            return weights.take(f"{name}.{of}", cut).float()

        self.inward = linear(weights.take(f"{name}.inward.weight", cut), format=format, dtype=dtype)
        columns = weights.take(f"{name}.outward.weight", Cut(1, group.index, group.size))
        self.outward = linear(columns, format=format, dtype=dtype)
        self.recurrence = MambaWeights(
            conv_C1K=exact("conv_weight"),
            conv_bias_C=exact("conv_bias"),
            dt_bias_H=exact("dt_bias"),
            a_H=-exact("a_log").exp(),
            d_H=exact("d"),
            shortest_step=SHORTEST_STEP,
        )
        self.norm_C = exact("norm.weight")
        self.form: Form = self.inward.form
        self.bytes_per_slot = sum(one.nbytes for one in self._room(1, torch.device("meta")))
        self.state: MambaState | None = None

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        self.state = self._room(slots, device)

    def _room(self, slots: int, device: torch.device) -> MambaState:
        inputs = (slots, self.shape.conv - 1, self.groups * sum(conv_sections(self.shape)))
        state = (slots, self.heads, self.shape.head_dim, self.shape.state)
        return MambaState(
            torch.zeros(inputs, dtype=self.dtype, device=device),
            torch.zeros(state, dtype=torch.float32, device=device),
        )

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        gate, *rest = inward_sections(self.shape)
        gate_NGC, mixed_NGC = self.inward(x).unflatten(-1, (self.groups, -1)).split((gate, sum(rest)), dim=-1)
        y_NC = self._through_states(mixed_NGC, inputs)
        normed_NC = gated_norm(y_NC[None], gate_NGC[None], self.norm_C, self.eps)[0]
        return self.group.sum(self.outward(in_form(normed_NC, self.outward.form)))

    def _through_states(self, mixed_NGC: Tensor, inputs: Inputs) -> Tensor:
        """Every part's tokens through the convolution and the recurrence; tokens of no part give zero."""
        assert self.state is not None
        first, made = inputs.decodes, []
        if first:
            rows = Rows(inputs.slots_P[:first], inputs.positions_N[:first], inputs.lengths_P[:first])
            made.append(mamba_step(mixed_NGC[:first], self.recurrence, self.state, rows))
        for part, (_, count) in enumerate(inputs.parts, start=inputs.decodes):
            if count:
                slot_1, begins_1 = inputs.slots_P[part : part + 1], inputs.positions_N[first : first + 1] == 0
                made.append(self._chunk(mixed_NGC[first : first + count], slot_1, begins_1, self.state))
            first += count
        if first < len(mixed_NGC) or not made:
            made.append(mixed_NGC.new_zeros(len(mixed_NGC) - first, self.heads * self.shape.head_dim))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _chunk(self, mixed_TGC: Tensor, slot_1: Tensor, begins_1: Tensor, state: MambaState) -> Tensor:
        """Tokens that follow one another in one sequence; one that begins starts from zero."""
        values, b, c, steps = inward_sections(self.shape)[1:]
        new_TGC, step_TGK = mixed_TGC.split((values + b + c, steps), dim=-1)
        before_KC, before_HPN = (one.index_select(0, slot_1)[0].masked_fill(begins_1, 0) for one in state)
        convolved_TC = self._convolved(before_KC, new_TGC)
        x_TC, b_TC, c_TC = convolved_TC.split([self.groups * width for width in (values, b, c)], dim=-1)
        y_THP, after_HPN = ssd_from(
            before_HPN,
            x_TC.unflatten(-1, (self.heads, -1)),
            time_steps(step_TGK, self.recurrence),
            self.recurrence.a_H,
            b_TC.unflatten(-1, (self.groups, -1)),
            c_TC.unflatten(-1, (self.groups, -1)),
            self.recurrence.d_H,
            self.shape.chunk,
        )
        newest_TC = new_TGC[max(0, len(new_TGC) - len(before_KC)) :].flatten(1)
        after_KC = torch.cat((before_KC, newest_TC))[len(newest_TC) :]
        for all_S, after in zip(state, (after_KC, after_HPN), strict=True):
            all_S.index_copy_(0, slot_1, after[None])
        return y_THP.flatten(1)

    def _convolved(self, before_KC: Tensor, new_TGC: Tensor) -> Tensor:
        """As if nothing came before; then the first tokens again, which do reach back."""
        kept, reach, sections = len(before_KC), self.shape.conv, conv_sections(self.shape)
        weights = (self.recurrence.conv_C1K, self.recurrence.conv_bias_C)
        seam_TGC = torch.cat((before_KC.unflatten(-1, new_TGC.shape[1:]), new_TGC[:reach]))
        convolved_BTC, again_BTC = (causal_conv(one[None], *weights, sections) for one in (new_TGC, seam_TGC))
        convolved_BTC[0, :reach] = again_BTC[0, kept:]
        return convolved_BTC[0]
