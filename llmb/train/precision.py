"""Mixed precision, applied to a plain fp32 model from outside.

bf16: AdamW updates fp32 master weights; activations and GEMM operands are bf16 from the embedding on. On one rank the
master weights are split, and GEMMs read the bf16 half (`split_weights.py`); on several a weight is fp32 and cast as it
is gathered, or as it is used: the copy is freed at once and recomputed in the backward pass. Weights, gradients and
both Adam moments take 16 bytes per parameter, on one rank as few as 10.

fp8: as bf16, but the three GEMMs of every linear layer inside the layer stack, experts included, take fp8 operands
(`llmb/ops/gemm/fp8_linear.py`, `fp8_grouped_gemm.py`). Embedding, head and norms stay bf16 and routers fp32. A layer
whose sizes fp8 GEMMs do not support computes in bf16; `fits_fp8` decides.

Routed experts are most of the weights of an MoE, and a step reads each of them in fp8 twice per micro-batch. Where they
are not sharded over replicas they are quantized once per step and cached, for 2 more bytes per weight.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.errors import ConfigError
from llmb.models.architectures import Network
from llmb.models.blocks import Attention, GatedMlp
from llmb.models.moe import GroupedLinear
from llmb.ops.activation.activation_autograd import gated_mlp
from llmb.ops.embedding.embedding_autograd import fused_embedding
from llmb.ops.gemm.fp8_linear import fits_fp8, fp8_linear
from llmb.ops.gemm.linear_autograd import linear, linears
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_gemm
from llmb.ops.quant.fp8_quant import FP8_ALIGNMENT
from llmb.ops.quant.group_quant import Fp8WeightCache
from llmb.train.parallel.local_shards import is_fsdp_sharded

FP8_CAPABILITY = (8, 9)  # compute capability: Ada; Hopper is 9.0
GROUPED_FP8_CAPABILITY = (9, 0)  # torch's fp8 grouped GEMM supports only Hopper


class CastLinear(nn.Linear):
    """Linear layer that casts its fp32 weight to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class FusedEmbedding(nn.Embedding):
    """Embedding whose gradient is reduced in fp32 and accumulated in place."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return fused_embedding(tokens_BT, self.weight)


class FusedAttention(Attention):
    """Attention whose q, k and v projections are one autograd node; its linear layers only hold the weights."""

    def project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return linears(x, self.q.weight, self.k.weight, self.v.weight)


class FusedGatedMlp(GatedMlp):
    """Gated MLP that saves half as many activations; its linear layers only hold the weights."""

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.gate.weight, self.up.weight, self.down.weight)


class Fp8Linear(CastLinear):
    """Linear layer with fp8 GEMMs where its sizes allow."""

    fp8_fast_accum = False  # of the backward pass

    def forward(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape  # of the local shard
        if fits_fp8(x.shape[:-1].numel(), inputs, outputs):
            return fp8_linear(x, self.weight, self.fp8_fast_accum)
        return super().forward(x)


class Fp8GroupedLinear(GroupedLinear):
    """Grouped linear layer of experts with fp8 GEMMs; rows can be padded to any multiple."""

    fp8_fast_accum = False
    fp8_cache: Fp8WeightCache | None = None  # of a weight that stays

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        weight = self.weight
        if len(x_MI) and self._fits(weight):
            return fp8_grouped_gemm(x_MI, weight, ends_E, self.fp8_cache, self.fp8_fast_accum)
        return super().forward(x_MI, ends_E)

    def cache_weight(self) -> None:
        """Quantize the cached weight before it is needed."""
        weight = self.weight
        if self.fp8_cache is not None and self._fits(weight):
            self.fp8_cache.get(weight, torch.bfloat16)

    def _fits(self, weight_EOI: Tensor) -> bool:
        _, outputs, inputs = weight_EOI.shape
        return fits_fp8(FP8_ALIGNMENT, inputs, outputs)


def compute_in_bf16(network: Network) -> None:
    """Make a network with fp32 parameters compute in bf16; grouped linear layers already cast their weights."""
    for block in network.modules():  # whose linear layers have not been replaced
        if type(block) is Attention and type(block.q) is nn.Linear:
            block.__class__ = FusedAttention
        if type(block) is GatedMlp and type(block.gate) is nn.Linear and block.activation == "silu":
            block.__class__ = FusedGatedMlp
    _swap_class(network, nn.Linear, CastLinear)
    _swap_class(network, nn.Embedding, FusedEmbedding)
    if network.embedding is not None:
        network.embedding.register_forward_hook(lambda _module, _args, x_BTC: x_BTC.to(torch.bfloat16))


def compute_in_fp8(
    network: Network, device: torch.device, fp8_fast_accum: bool = False, fp8_experts: bool = True
) -> None:
    """Make a network with fp32 parameters compute the GEMMs of its layers in fp8 and the rest in bf16.

    Without `fp8_experts` the grouped GEMMs of experts belong to the rest.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigError(
            f"dtype=fp8 needs a GPU of compute capability 8.9 or more, this one has {capability}; try bf16"
        )
    _swap_class(network.layers, nn.Linear, Fp8Linear)
    if fp8_experts:
        _check_grouped(network, device)
        _swap_class(network.layers, GroupedLinear, Fp8GroupedLinear)
    for module in network.layers.modules():
        if isinstance(module, Fp8Linear | Fp8GroupedLinear):
            module.fp8_fast_accum = fp8_fast_accum
    compute_in_bf16(network)


def _check_grouped(network: Network, device: torch.device) -> None:
    if device.type != "cuda" or not any(isinstance(module, GroupedLinear) for module in network.modules()):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability != GROUPED_FP8_CAPABILITY:
        raise ConfigError(
            "dtype=fp8 with experts needs a GPU of compute capability 9.0 (Hopper), "
            f"this one has {capability[0]}.{capability[1]}; set fp8_experts=false, which computes them in bf16"
        )


def cache_fp8_weights(network: Network) -> None:
    """Cache fp8 expert weights that are not sharded over replicas; call it after sharding.

    A gathered weight is a new tensor each time, without a version to compare, and its memory should be freed.
    """
    for module in network.modules():
        if isinstance(module, Fp8GroupedLinear):
            weight = module._parameters["weight"]
            if not (isinstance(weight, DTensor) and is_fsdp_sharded(weight)):
                module.fp8_cache = Fp8WeightCache()


def _swap_class(network: nn.Module, plain: type[nn.Module], subclass: type[nn.Module]) -> None:
    """Turn every module of exactly the plain class into the subclass, which has no state of its own."""
    for module in network.modules():
        if type(module) is plain:
            module.__class__ = subclass
