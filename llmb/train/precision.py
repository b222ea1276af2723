"""Number formats, applied to a finished model from outside.

bf16: the optimizer updates fp32 numbers. Activations are bf16 from the embedding on, as are operands of products. On
one rank a weight is kept in two halves, of which products take the bf16 one (`split_weights.py`); on several it is fp32 and
cast as it is gathered, or as it is used: the copy is dropped at once and made again in the backward pass.
Weights, gradients and both Adam moments take 16 bytes a parameter, on one rank as few as 10.

fp8: as bf16, but the three products of every linear layer inside the stack, experts included, take 8-bit operands
(`llmb/ops/gemm/fp8_linear.py`, `fp8_grouped_gemm.py`). Embedding, head and norms stay bf16 and routers fp32. A layer whose sizes the
hardware's 8-bit products do not take computes in bf16; `fits_fp8` decides.

Routed experts are most of such a model's weights, and a step reads each of them in 8 bits twice a micro-batch. Where
they stay on a rank they are cast once a step and kept, for 2 bytes a weight more.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.errors import ConfigError
from llmb.models.architectures import Network
from llmb.models.blocks import Attention, GatedMlp
from llmb.models.moe import GroupedLinear
from llmb.ops.activation.gated_mlp_autograd import gated_mlp
from llmb.ops.embedding.embedding_autograd import embedded
from llmb.ops.gemm.fp8_linear import MULTIPLE, fits_fp8, fp8_linear
from llmb.ops.gemm.linear_autograd import linear, linears
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_product
from llmb.ops.quant.group_quant import WeightForms
from llmb.train.parallel.local_shards import is_put_away

FP8_CAPABILITY = (8, 9)  # of a CUDA device: Ada; Hopper is 9.0
GROUPED_FP8_CAPABILITY = (9, 0)  # torch's grouped products of 8-bit numbers are written for Hopper alone


class CastLinear(nn.Linear):
    """A linear layer whose weight is wider than its input: computes in the input's format."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class FusedEmbedding(nn.Embedding):
    """An embedding whose gradient is summed in fp32, and added to where it is."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return embedded(tokens_BT, self.weight)


class FusedAttention(Attention):
    """Attention whose three projections are one step of autograd; its linear layers for them only hold the weights."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return linears(x, self.q.weight, self.k.weight, self.v.weight)


class FusedGatedMlp(GatedMlp):
    """A gated MLP that keeps half as much for its backward pass; its linear layers only hold the weights."""

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.gate.weight, self.up.weight, self.down.weight)


class Fp8Linear(CastLinear):
    """A linear layer whose products take 8-bit operands, where they can."""

    fast_sums = False  # of the way back

    def forward(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape  # of the part that is here
        if fits_fp8(x.shape[:-1].numel(), inputs, outputs):
            return fp8_linear(x, self.weight, self.fast_sums)
        return super().forward(x)


class Fp8GroupedLinear(GroupedLinear):
    """The same for the weights of experts, whose rows can be padded to any multiple."""

    fast_sums = False
    forms: WeightForms | None = None  # of a weight that stays

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        weight = self.weight
        if len(x_MI) and self._fits(weight):
            return fp8_grouped_product(x_MI, weight, ends_E, self.forms, self.fast_sums)
        return super().forward(x_MI, ends_E)

    def make_forms(self) -> None:
        """Those that are kept, before they are needed."""
        weight = self.weight
        if self.forms is not None and self._fits(weight):
            self.forms.of(weight, torch.bfloat16)

    def _fits(self, weight_EOI: Tensor) -> bool:
        _, outputs, inputs = weight_EOI.shape
        return fits_fp8(MULTIPLE, inputs, outputs)


def compute_in_bf16(network: Network) -> None:
    """Make a network with fp32 parameters compute in bf16; grouped linear layers cast their weights by themselves."""
    for block in network.modules():  # whose own linear layers were not replaced by others before
        if type(block) is Attention and type(block.q) is nn.Linear:
            block.__class__ = FusedAttention
        if type(block) is GatedMlp and type(block.gate) is nn.Linear and block.activation == "silu":
            block.__class__ = FusedGatedMlp
    _replace(network, nn.Linear, CastLinear)
    _replace(network, nn.Embedding, FusedEmbedding)
    if network.embedding is not None:
        network.embedding.register_forward_hook(lambda _module, _args, stream: stream.to(torch.bfloat16))


def compute_in_fp8(network: Network, device: torch.device, fast_sums: bool = False) -> None:
    """Make a network with fp32 parameters compute its stack's matrix products in fp8 and the rest in bf16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigError(f"dtype=fp8 needs a GPU of compute capability 8.9 or more, this one has {found}; try bf16")
    _check_grouped(network, device)
    _replace(network.layers, nn.Linear, Fp8Linear)
    _replace(network.layers, GroupedLinear, Fp8GroupedLinear)
    for module in network.layers.modules():
        if isinstance(module, Fp8Linear | Fp8GroupedLinear):
            module.fast_sums = fast_sums
    compute_in_bf16(network)


def _check_grouped(network: Network, device: torch.device) -> None:
    if device.type != "cuda" or not any(isinstance(module, GroupedLinear) for module in network.modules()):
        return
    found = torch.cuda.get_device_capability(device)
    if found != GROUPED_FP8_CAPABILITY:
        raise ConfigError(
            "dtype=fp8 with experts needs a GPU of compute capability 9.0 (Hopper), "
            f"this one has {found[0]}.{found[1]}; try bf16"
        )


def keep_forms(network: Network) -> None:
    """Once weights are spread: those of experts that no rank gathers from others are cast when they have changed.

    What is gathered comes anew without a sign of it, and its memory is to be free in between.
    """
    for module in network.modules():
        if isinstance(module, Fp8GroupedLinear):
            weight = module._parameters["weight"]
            if not (isinstance(weight, DTensor) and is_put_away(weight)):
                module.forms = WeightForms()


def _replace(network: nn.Module, plain: type[nn.Module], precise: type[nn.Module]) -> None:
    """Every layer of exactly the plain kind becomes one of the other, which is a subclass without state of its own."""
    for module in network.modules():
        if type(module) is plain:
            module.__class__ = precise
