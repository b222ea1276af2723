"""Mixture of experts (MoE) of a served model: this rank's shard of the routed experts, and the shared experts.

Every rank of the expert group has the same tokens, so all routers decide alike without communication. Each rank sums
the outputs of its own experts for all tokens; `combine` sums over the ranks, whether they have other experts or another
slice of the same experts' width. Shared experts are sharded like dense layers.

Shapes: N tokens, K experts per token, E experts of this rank, C hidden size, F expert width on this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.moe import moe_config
from llmb.ops.moe.expert_weights import (
    FP4_GROUPS,
    ExpertFormat,
    ExpertWeights,
    empty_expert_weights,
    fill_expert_rows,
)
from llmb.ops.moe.fused_moe import Routing, fused_moe
from llmb.ops.moe.router import route
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation
from llmb.ops.quant.e2m1 import SWIZZLE_GROUP
from llmb.serve.layers.served_linear import Format, supported_format
from llmb.serve.layers.served_mlp import ServedGatedMlp
from llmb.serve.rank_groups import ExpertGroup, RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import WeightShard, WeightSource

MATRICES = ("gate", "up", "down")
EXPERT_FORMATS: dict[Format, ExpertFormat] = {
    "plain": "plain",
    "fp8_tensor": "per_token",  # equal scales of all outputs; activations have per-token scales
    "fp8_channel": "per_token",
    "fp8_block": "1x128",
    "nvfp4": "nvfp4",  # stored in 4 bits, unlike dense layers: most of the model is num_local
    "mxfp4": "mxfp4",
}


class ServedRouter:
    """Top-k router in fp32, equal to `llmb.models.moe.Router`."""

    def __init__(self, weights: WeightSource, name: str, model: Model):
        self.experts = moe_config(model)
        self.weight_EC = weights.load(f"{name}.weight")
        self.bias_E = weights.load(f"{name}.bias").float() if self.experts.has_correction_bias else None
        self.logit_bias_E = weights.load(f"{name}.logit_bias").float() if self.experts.bias else None

    def __call__(self, x_NC: Tensor, slot_mapping_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and expert indices, both [N, K]; padding (a negative slot mapping) is routed nowhere."""
        logits_NE = self._logits(x_NC)
        if self.logit_bias_E is not None:
            logits_NE += self.logit_bias_E
        return route(logits_NE, self.bias_E, self.experts, slot_mapping_N)

    def _logits(self, x_NC: Tensor) -> Tensor:
        if x_NC.is_cuda and x_NC.dtype == self.weight_EC.dtype == torch.bfloat16:
            # Products of two bf16 numbers are exact in fp32: the same sums as below, on tensor cores.
            return torch.mm(x_NC, self.weight_EC.T, out_dtype=torch.float32)
        return F.linear(x_NC.float(), self.weight_EC.float())


class ServedMoe:
    """Routed experts of this rank plus the shared experts; without cache or state."""

    input_format: QuantFormat = "plain"  # the router's; the input of the experts is quantized here
    captures_prefill = True
    window = None
    bytes_per_token = bytes_per_slot = 0

    def __init__(
        self,
        weights: WeightSource,
        name: str,
        model: Model,
        format: Format,
        dtype: torch.dtype,
        expert_group: ExpertGroup,
        shared_group: RankGroup,
    ):
        experts = moe_config(model)
        expert_format = _shard_format(format, model, expert_group)
        self.router = ServedRouter(weights, f"{name}.router", model)
        num_local, width = experts.count // expert_group.size, experts.ffn // expert_group.tp.size
        self.count, self.first = experts.count, num_local * expert_group.index
        layout = (EXPERT_FORMATS[expert_format], dtype, self.router.weight_EC.device)
        self.gate_up = empty_expert_weights((num_local, 2 * width, model.hidden), *layout)
        self.down = empty_expert_weights((num_local, model.hidden, width), *layout)
        # Only one of the three is in memory unquantized at a time.
        _fill(self.gate_up, weights, f"{name}.gate.weight", 1, 0, expert_format, expert_group)
        _fill(self.gate_up, weights, f"{name}.up.weight", 1, width, expert_format, expert_group)
        _fill(self.down, weights, f"{name}.down.weight", 2, 0, expert_format, expert_group)
        if experts.bias:
            gate, up, down = (_load_bias(weights, f"{name}.{m}.bias", dtype, expert_group) for m in MATRICES)
            self.gate_up = self.gate_up._replace(bias=torch.cat((gate, up), dim=1))
            self.down = self.down._replace(bias=down)
        self.activation, self.dtype, self.group = model.activation, dtype, expert_group
        self.shared: ServedGatedMlp | None = None
        if experts.shared:
            self.shared = ServedGatedMlp(weights, f"{name}.shared", model.activation, format, dtype, shared_group)

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        pass

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        assert isinstance(x, Tensor)
        tokens_NC = self.group.dispatch(x)
        is_local = tokens_NC is x  # else it has tokens of other ranks, whose slot mapping is unknown
        routing = Routing(*self.router(tokens_NC, inputs.slot_mapping_N if is_local else None), self.count, self.first)
        quantized = quantize_activation(tokens_NC, self.gate_up.quant_format)
        partial_NC = fused_moe(quantized, routing, self.gate_up, self.down, self.activation, self.dtype)
        routed_NC = self.group.combine(partial_NC)
        if self.shared is None:
            return routed_NC
        if not is_local or self.shared.input_format != self.gate_up.quant_format:
            quantized = quantize_activation(x, self.shared.input_format)
        return routed_NC + self.shared(quantized, inputs)


def _fill(
    target: ExpertWeights,
    weights: WeightSource,
    name: str,
    width_dim: int,
    start: int,
    format: Format,
    group: ExpertGroup,
) -> None:
    """Quantize this rank's shard of a matrix of every expert into the outputs from `start`, one expert at a time."""
    weight_EOI = weights.load(name, WeightShard(0, group.index, group.size))
    shard_EOI = WeightShard(width_dim, group.tp.index, group.tp.size).slice(weight_EOI)
    for expert, weight_OI in enumerate(shard_EOI):
        fill_expert_rows(target, expert, start, weight_OI, per_tensor=format == "fp8_tensor")


def _load_bias(weights: WeightSource, name: str, dtype: torch.dtype, group: ExpertGroup) -> Tensor:
    """Load the biases of this rank's experts; of ranks that share an expert's width, the first adds those of down."""
    bias_EO = weights.load(name, WeightShard(0, group.index, group.size)).to(dtype)
    if not name.endswith("down.bias"):
        return WeightShard(1, group.tp.index, group.tp.size).slice(bias_EO)
    return bias_EO if group.tp.index == 0 else torch.zeros_like(bias_EO)


def _shard_format(format: Format, model: Model, group: ExpertGroup) -> Format:
    """Return the format of this rank's experts; raise if the shards are not equal."""
    experts = moe_config(model)
    if experts.count % group.size:
        raise ConfigError(f"model {model.name}: {experts.count} experts cannot be split evenly over {group.size} ranks")
    if experts.ffn % group.tp.size:
        raise ConfigError(
            f"model {model.name}: experts of width {experts.ffn} cannot be split over {group.tp.size} ranks"
        )
    return expert_shard_format(format, model, group.tp.size)


def expert_shard_format(format: Format, model: Model, expert_tp: int) -> Format:
    """Return the format, or plain if it does not support the shapes of experts divided among so many ranks."""
    width = moe_config(model).ffn // expert_tp
    fits = supported_format(format, width, model.hidden) == supported_format(format, model.hidden, width) == format
    if EXPERT_FORMATS[format] in FP4_GROUPS:
        fits = fits and model.hidden % SWIZZLE_GROUP == width % SWIZZLE_GROUP == 0
    return format if fits else "plain"
