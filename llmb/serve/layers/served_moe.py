"""A mixture of experts of a served model: this rank's share of the experts, and the shared ones that all tokens visit.

Every rank of the experts' group looks at the same tokens, so all routers decide alike and nobody has to be told. Each
rank adds up what its own experts say of all tokens; `collect` adds up the ranks, those that have other experts and
those that have another part of the same experts' width alike. Shared experts are cut as dense layers are.

Shapes: N tokens, K experts a token visits, E experts of this rank, C hidden width, F an expert's width on this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.moe import experts_of
from llmb.ops.moe.expert_weights import Kind, Stacked, empty_stack, fill_rows
from llmb.ops.moe.fused_moe import Visits, routed_mlp
from llmb.ops.moe.router import route
from llmb.ops.quant.activation_quant import Activation, Form, in_form
from llmb.serve.layers.served_linear import Format, fitting
from llmb.serve.layers.served_mlp import ServedGatedMlp
from llmb.serve.rank_groups import ExpertGroup, Group
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, Weights

KINDS: dict[Format, Kind] = {
    "plain": "plain",
    "fp8_tensor": "rows8",  # kept as a scale for each output, all alike; activations have one for each token
    "fp8_channel": "rows8",
    "fp8_block": "groups8",
    "nvfp4": "nvfp4",  # unlike dense layers' kept in 4 bits: most of the model is here
}


class ServedRouter:
    """Which experts each token visits and with what weight, in fp32, as `llmb.models.moe.Router` decides it."""

    def __init__(self, weights: Weights, name: str, model: Model):
        self.experts = experts_of(model)
        self.weight_EC = weights.take(f"{name}.weight")
        self.bias_E = weights.take(f"{name}.bias").float() if self.experts.score == "sigmoid" else None

    def __call__(self, x_NC: Tensor, places_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N, K] both; what only fills up a step (its place is negative, if places are given) visits nobody."""
        return route(self._logits(x_NC), self.bias_E, self.experts, places_N)

    def _logits(self, x_NC: Tensor) -> Tensor:
        if x_NC.is_cuda and x_NC.dtype == self.weight_EC.dtype == torch.bfloat16:
            # Products of two 8-bit mantissas are exact in fp32: the same sums as below, on tensor cores.
            return torch.mm(x_NC, self.weight_EC.T, out_dtype=torch.float32)
        return F.linear(x_NC.float(), self.weight_EC.float())


class ServedExperts:
    """Routed experts, computed where they are, and shared ones added to them. Keeps nothing between steps."""

    form: Form = "plain"  # the router's; what the experts read is rounded here
    bytes_per_token = bytes_per_slot = 0

    def __init__(
        self,
        weights: Weights,
        name: str,
        model: Model,
        format: Format,
        dtype: torch.dtype,
        experts_group: ExpertGroup,
        shared_group: Group,
    ):
        experts = experts_of(model)
        kept = _fitting_share(format, model, experts_group)
        self.router = ServedRouter(weights, f"{name}.router", model)
        here, width = experts.count // experts_group.size, experts.ffn // experts_group.width.size
        self.count, self.first = experts.count, here * experts_group.index
        kind = (KINDS[kept], dtype, self.router.weight_EC.device)
        self.both = empty_stack((here, 2 * width, model.hidden), *kind)
        self.down = empty_stack((here, model.hidden, width), *kind)
        # Only one of the three is there unrounded at a time.
        _fill(self.both, weights, f"{name}.gate.weight", 1, 0, kept, experts_group)
        _fill(self.both, weights, f"{name}.up.weight", 1, width, kept, experts_group)
        _fill(self.down, weights, f"{name}.down.weight", 2, 0, kept, experts_group)
        self.activation, self.dtype, self.group = model.activation, dtype, experts_group
        self.shared: ServedGatedMlp | None = None
        if experts.shared:
            self.shared = ServedGatedMlp(weights, f"{name}.shared", model.activation, format, dtype, shared_group)

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        pass

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        everybodys_NC = self.group.spread(x)
        alone = everybodys_NC is x  # else some tokens are others', whose places are not known here
        visits = Visits(*self.router(everybodys_NC, inputs.places_N if alone else None), self.count, self.first)
        read = in_form(everybodys_NC, self.both.form)
        routed_NC = self.group.collect(routed_mlp(read, visits, self.both, self.down, self.activation, self.dtype))
        if self.shared is None:
            return routed_NC
        fits = alone and self.shared.form == self.both.form
        return routed_NC + self.shared(read if fits else in_form(x, self.shared.form), inputs)


def _fill(
    stack: Stacked, weights: Weights, name: str, width_dim: int, start: int, format: Format, group: ExpertGroup
) -> None:
    """Round this rank's share of a matrix of every expert into its outputs from `start` on, one expert at a time."""
    whole_EOI = weights.take(name, Cut(0, group.index, group.size))
    share_EOI = Cut(width_dim, group.width.index, group.width.size).of(whole_EOI)
    for expert, weight_OI in enumerate(share_EOI):
        fill_rows(stack, expert, start, weight_OI, alike=format == "fp8_tensor")


def _fitting_share(format: Format, model: Model, group: ExpertGroup) -> Format:
    """The format, or plain where it cannot take this rank's matrices; an error where there is no equal share."""
    experts = experts_of(model)
    if experts.count % group.size:
        raise ConfigError(f"model {model.name}: {experts.count} experts cannot be dealt evenly to {group.size} ranks")
    if experts.ffn % group.width.size:
        raise ConfigError(f"model {model.name}: experts of width {experts.ffn} cannot be cut in {group.width.size}")
    width = experts.ffn // group.width.size
    fits = fitting(format, width, model.hidden) == fitting(format, model.hidden, width) == format
    return format if fits else "plain"
