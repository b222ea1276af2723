"""Dense MLPs of a served model: gated, with a fused gate and up gemm, and plain."""

import torch
from torch import Tensor

from llmb.ops.activation.activation import ACTIVATIONS, gated_activation
from llmb.ops.gemm.skinny_gemm import InputNorm, skinny_gemm
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation
from llmb.serve.layers.served_linear import Format, add_skinny_gemm, build_linear
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import WeightShard, WeightSource


class _Mlp:
    """A mixer without cache or state."""

    captures_prefill = True
    window = None
    bytes_per_token = bytes_per_slot = 0

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        pass


class ServedGatedMlp(_Mlp):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, weights: WeightSource, name: str, activation: str, format: Format, dtype: torch.dtype, group: RankGroup
    ):
        shard = WeightShard(0, group.index, group.size)
        gate_up = (weights.load(f"{name}.{matrix}.weight", shard) for matrix in ("gate", "up"))
        self.gate_up = build_linear(*gate_up, format=format, dtype=dtype)
        columns = weights.load(f"{name}.down.weight", WeightShard(1, group.index, group.size))
        self.down = build_linear(columns, format=format, dtype=dtype)
        self.activation, self.group = activation, group
        self.input_format: QuantFormat = self.gate_up.input_format

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        return self.group.all_reduce(
            self.down(gated_activation(self.gate_up(x), self.activation, self.down.input_format))
        )

    @property
    def has_skinny_path(self) -> bool:
        return self.gate_up.skinny_weight is not None and self.down.skinny_weight is not None

    def forward_skinny(self, residual_NC: Tensor, norm: InputNorm, inputs: StepInputs) -> Tensor:
        assert self.gate_up.skinny_weight is not None
        assert self.down.skinny_weight is not None
        hidden_NF = skinny_gemm(
            residual_NC, self.gate_up.skinny_weight, residual_NC.dtype, norm=norm, activation=self.activation
        )
        return add_skinny_gemm(residual_NC, hidden_NF, self.down.skinny_weight, self.group)


class ServedPlainMlp(_Mlp):
    """down(activation(up(x)))."""

    def __init__(
        self, weights: WeightSource, name: str, activation: str, format: Format, dtype: torch.dtype, group: RankGroup
    ):
        rows, columns = WeightShard(0, group.index, group.size), WeightShard(1, group.index, group.size)
        self.up = build_linear(weights.load(f"{name}.up.weight", rows), format=format, dtype=dtype)
        self.down = build_linear(weights.load(f"{name}.down.weight", columns), format=format, dtype=dtype)
        self.activation, self.group = ACTIVATIONS[activation], group
        self.input_format: QuantFormat = self.up.input_format

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        return self.group.all_reduce(
            self.down(quantize_activation(self.activation(self.up(x)), self.down.input_format))
        )
