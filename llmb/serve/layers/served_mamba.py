"""Mamba-2 mixer of a served model: `llmb/models/mamba2.py` with convolution and SSM states of each sequence.

The state of a sequence has a fixed size: the last inputs of the convolution and the SSM state, in the sequence's slot.
The decodes of a step go through one pair of kernels, prefill chunks one after the other through those of training.
Weights are ordered by group, so a rank's shard is some whole groups.

Shapes: N tokens of a step, T of one chunk, G groups, H heads, P head dimension, K cached inputs of the convolution;
C channels, of a group after G and of all otherwise.
"""

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.mamba2 import DT_MIN, conv_sections, in_proj_sections, mamba_config
from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.selective_state_update import (
    MambaState,
    MambaWeights,
    StateRows,
    compute_dt,
    selective_state_update,
)
from llmb.ops.mamba.ssd import ssd_with_state
from llmb.ops.norm.gated_norm import gated_norm
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation
from llmb.serve.layers.served_linear import Format, build_linear
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import WeightShard, WeightSource


class ServedMamba:
    """Mamba sublayer and the states of its sequences."""

    captures_prefill = False
    window = None
    bytes_per_token = 0

    def __init__(
        self, weights: WeightSource, name: str, model: Model, format: Format, dtype: torch.dtype, group: RankGroup
    ):
        self.shape, self.eps, self.dtype, self.group = mamba_config(model), model.norm_eps, dtype, group
        self.groups, self.heads = self.shape.groups // group.size, self.shape.heads // group.size
        shard = WeightShard(0, group.index, group.size)

        def load_fp32(parameter: str) -> Tensor:
            return weights.load(f"{name}.{parameter}", shard).float()

        self.in_proj = build_linear(weights.load(f"{name}.inward.weight", shard), format=format, dtype=dtype)
        columns = weights.load(f"{name}.outward.weight", WeightShard(1, group.index, group.size))
        self.out_proj = build_linear(columns, format=format, dtype=dtype)
        self.recurrence = MambaWeights(
            conv_C1K=load_fp32("conv_weight"),
            conv_bias_C=load_fp32("conv_bias"),
            dt_bias_H=load_fp32("dt_bias"),
            a_H=-load_fp32("a_log").exp(),
            d_H=load_fp32("d"),
            dt_min=DT_MIN,
        )
        self.norm_C = load_fp32("norm.weight")
        self.input_format: QuantFormat = self.in_proj.input_format
        self.bytes_per_slot = sum(tensor.nbytes for tensor in self._zero_state(1, torch.device("meta")))
        self.state: MambaState | None = None

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        self.state = self._zero_state(slots, device)

    def _zero_state(self, slots: int, device: torch.device) -> MambaState:
        conv_inputs = (slots, self.shape.conv - 1, self.groups * sum(conv_sections(self.shape)))
        state = (slots, self.heads, self.shape.head_dim, self.shape.state)
        return MambaState(
            torch.zeros(conv_inputs, dtype=self.dtype, device=device),
            torch.zeros(state, dtype=torch.float32, device=device),
        )

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        gate, *ssm_sections = in_proj_sections(self.shape)
        gate_NGC, ssm_NGC = self.in_proj(x).unflatten(-1, (self.groups, -1)).split((gate, sum(ssm_sections)), dim=-1)
        y_NC = self._update_states(ssm_NGC, inputs)
        normed_NC = gated_norm(y_NC[None], gate_NGC[None], self.norm_C, self.eps)[0]
        return self.group.all_reduce(self.out_proj(quantize_activation(normed_NC, self.out_proj.input_format)))

    def _update_states(self, ssm_NGC: Tensor, inputs: StepInputs) -> Tensor:
        """Compute convolution and SSM of every sequence; padding gives zero."""
        assert self.state is not None
        first, outputs = inputs.num_decodes, []
        if first:
            rows = StateRows(inputs.slots_P[:first], inputs.positions_N[:first], inputs.seq_lens_P[:first])
            outputs.append(selective_state_update(ssm_NGC[:first], self.recurrence, self.state, rows))
        for index, (_, count) in enumerate(inputs.prefill_chunks, start=inputs.num_decodes):
            if count:
                slot_1, is_first_1 = inputs.slots_P[index : index + 1], inputs.positions_N[first : first + 1] == 0
                outputs.append(self._chunk(ssm_NGC[first : first + count], slot_1, is_first_1, self.state))
            first += count
        if first < len(ssm_NGC) or not outputs:
            outputs.append(ssm_NGC.new_zeros(len(ssm_NGC) - first, self.heads * self.shape.head_dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _chunk(self, ssm_TGC: Tensor, slot_1: Tensor, is_first_1: Tensor, state: MambaState) -> Tensor:
        """Compute a prefill chunk of one sequence; a sequence's first chunk starts from zero state."""
        values, b, c, steps = in_proj_sections(self.shape)[1:]
        new_TGC, step_TGK = ssm_TGC.split((values + b + c, steps), dim=-1)
        before_KC, before_HPN = (states.index_select(0, slot_1)[0].masked_fill(is_first_1, 0) for states in state)
        convolved_TC = self._convolve(before_KC, new_TGC)
        x_TC, b_TC, c_TC = convolved_TC.split([self.groups * width for width in (values, b, c)], dim=-1)
        y_THP, after_HPN = ssd_with_state(
            before_HPN,
            x_TC.unflatten(-1, (self.heads, -1)),
            compute_dt(step_TGK, self.recurrence),
            self.recurrence.a_H,
            b_TC.unflatten(-1, (self.groups, -1)),
            c_TC.unflatten(-1, (self.groups, -1)),
            self.recurrence.d_H,
            self.shape.chunk,
        )
        newest_TC = new_TGC[max(0, len(new_TGC) - len(before_KC)) :].flatten(1)
        after_KC = torch.cat((before_KC, newest_TC))[len(newest_TC) :]
        for states, after in zip(state, (after_KC, after_HPN), strict=True):
            states.index_copy_(0, slot_1, after[None])
        return y_THP.flatten(1)

    def _convolve(self, before_KC: Tensor, new_TGC: Tensor) -> Tensor:
        """Convolve the chunk from zero state, then its first tokens again, with the cached inputs in front."""
        num_cached, reach, sections = len(before_KC), self.shape.conv, conv_sections(self.shape)
        weights = (self.recurrence.conv_C1K, self.recurrence.conv_bias_C)
        seam_TGC = torch.cat((before_KC.unflatten(-1, new_TGC.shape[1:]), new_TGC[:reach]))
        convolved_BTC, again_BTC = (causal_conv1d(x_TGC[None], *weights, sections) for x_TGC in (new_TGC, seam_TGC))
        convolved_BTC[0, :reach] = again_BTC[0, num_cached:]
        return convolved_BTC[0]
