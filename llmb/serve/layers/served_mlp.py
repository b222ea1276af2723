"""Dense MLPs of a served model: gated, with gate and up in one product, and plain ones."""

import torch
from torch import Tensor

from llmb.models.blocks import ACTIVATIONS
from llmb.ops.activation.gated_act import gated
from llmb.ops.gemm.skinny_gemm import Norm, thin_product
from llmb.ops.quant.activation_quant import Activation, Form, in_form
from llmb.serve.layers.served_linear import Format, linear, thin_onto
from llmb.serve.rank_groups import Group
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, Weights


class _Mlp:
    """Keeps nothing between steps."""

    bytes_per_token = bytes_per_slot = 0

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        pass


class ServedGatedMlp(_Mlp):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, weights: Weights, name: str, activation: str, format: Format, dtype: torch.dtype, group: Group):
        cut = Cut(0, group.index, group.size)
        both = (weights.take(f"{name}.{one}.weight", cut) for one in ("gate", "up"))
        self.both = linear(*both, format=format, dtype=dtype)
        columns = weights.take(f"{name}.down.weight", Cut(1, group.index, group.size))
        self.down = linear(columns, format=format, dtype=dtype)
        self.activation, self.group = activation, group
        self.form: Form = self.both.form

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        return self.group.sum(self.down(gated(self.both(x), self.activation, self.down.form)))

    @property
    def has_thin(self) -> bool:
        return self.both.thin is not None and self.down.thin is not None

    def thin(self, stream_NC: Tensor, norm: Norm, inputs: Inputs) -> Tensor:
        assert self.both.thin is not None
        assert self.down.thin is not None
        mixed_NF = thin_product(stream_NC, self.both.thin, stream_NC.dtype, norm=norm, activation=self.activation)
        return thin_onto(stream_NC, mixed_NF, self.down.thin, self.group)


class ServedPlainMlp(_Mlp):
    """down(activation(up(x)))."""

    def __init__(self, weights: Weights, name: str, activation: str, format: Format, dtype: torch.dtype, group: Group):
        rows, columns = Cut(0, group.index, group.size), Cut(1, group.index, group.size)
        self.up = linear(weights.take(f"{name}.up.weight", rows), format=format, dtype=dtype)
        self.down = linear(weights.take(f"{name}.down.weight", columns), format=format, dtype=dtype)
        self.activation, self.group = ACTIVATIONS[activation], group
        self.form: Form = self.up.form

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        return self.group.sum(self.down(in_form(self.activation(self.up(x)), self.down.form)))
