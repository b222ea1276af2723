"""Mixed precision, applied to a plain fp32 model from outside.

bf16: AdamW updates fp32 master weights, whose bf16 halves GEMMs read (`parallel/bucket.py`); activations are bf16 from
the embedding on. Weights, gradients and both Adam moments take 16 bytes per parameter, or as few as 8.

fp8: as bf16, but the three GEMMs of every linear layer inside the layer stack, experts included, take fp8 operands
(`llmb/ops/gemm/fp8_linear.py`, `fp8_grouped_gemm.py`). Embedding, head and norms stay bf16 and routers fp32. A layer
whose sizes fp8 GEMMs do not support computes in bf16; `fits_fp8` decides. Scales follow the recipe of the run
(`llmb/ops/quant/delayed_scaling.py`), those of experts are row-wise.

Routed experts are most of the weights of an MoE, and a step reads each of them in fp8 twice per micro-batch. Where they
stay in memory they are quantized once per step and cached, for 2 more bytes per weight.

Modules of a plain network change their class to one of those here (`module_class.py`) and keep their parameters, which
a forward pass reads anew each time: between two, they may be sharded or move.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmb.errors import ConfigError
from llmb.models.architectures import Network
from llmb.models.blocks import Attention, GatedMlp, TokenEmbedding
from llmb.models.moe import GroupedLinear
from llmb.ops.activation.activation_autograd import gated_mlp
from llmb.ops.device_capabilities import capabilities, check_dtypes
from llmb.ops.embedding.embedding_autograd import fused_embedding
from llmb.ops.gemm.fp8_linear import OperandNames, fits_fp8, fp8_linear
from llmb.ops.gemm.linear_autograd import linear, linears
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_gemm
from llmb.ops.quant.delayed_scaling import ReduceMax, Scaling
from llmb.ops.quant.fp8_quant import FP8_ALIGNMENT
from llmb.ops.quant.group_quant import Fp8WeightCache
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS, RankReductions
from llmb.train.module_class import use_class
from llmb.train.parallel.bucket import BucketParameter
from llmb.train.parallel.mesh import Mesh

SHARED_INPUTS = (("q", "k", "v"), ("gate", "up"), ("q_down", "kv_down"))  # linear layers of a block that read one


class CastLinear(nn.Linear):
    """Linear layer that casts a wider weight to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class FusedEmbedding(TokenEmbedding):
    """Embedding whose gradient is reduced in fp32 and accumulated in place; tokens outside of its rows give zeros."""

    first_row = 0  # of the vocabulary

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return fused_embedding(tokens_BT, self.weight, self.first_row)


class FusedQkvAttention(Attention):
    """Attention whose q, k and v projections are one autograd node; its linear layers only hold the weights."""

    def project_qkv(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        return linears(x_BTC, self.q.weight, self.k.weight, self.v.weight)


class FusedGatedMlp(GatedMlp):
    """Gated MLP that saves half as many activations; its linear layers only hold the weights."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return gated_mlp(x_BTC, self.gate.weight, self.up.weight, self.down.weight, self.activation)


class Fp8Linear(nn.Linear):
    """Linear layer with fp8 GEMMs where its sizes allow."""

    scaling: Scaling
    operands: OperandNames
    fp8_fast_accum = False  # of the backward pass

    def forward(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape  # of the local shard
        if fits_fp8(x.shape[:-1].numel(), inputs, outputs):
            return fp8_linear(x, self.weight, self.scaling, self.operands, self.fp8_fast_accum)
        return linear(x, self.weight)


class Fp8GroupedLinear(GroupedLinear):
    """Grouped linear layer of experts with fp8 GEMMs; rows can be padded to any multiple."""

    fp8_fast_accum = False
    fp8_cache: Fp8WeightCache | None = None  # of a weight that stays

    def matmul(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        if len(x_MI) and self._fits():
            return fp8_grouped_gemm(x_MI, self.weight, ends_E, self.fp8_cache, self.fp8_fast_accum)
        return super().matmul(x_MI, ends_E)

    def cache_weight(self) -> None:
        """Quantize the cached weight before it is needed."""
        if self.fp8_cache is not None and self._fits():
            self.fp8_cache.get(self.weight, torch.bfloat16)

    def _fits(self) -> bool:
        _, outputs, inputs = self.weight.shape
        return fits_fp8(FP8_ALIGNMENT, inputs, outputs)


def compute_in_bf16(network: Network) -> None:
    """Make a network compute in bf16; grouped linear layers already cast their weights."""
    for block in network.modules():  # whose linear layers have no other forward pass yet
        if isinstance(block, Attention) and type(block.q) is nn.Linear:
            use_class(block, FusedQkvAttention)
        if isinstance(block, GatedMlp) and type(block.gate) is nn.Linear:
            use_class(block, FusedGatedMlp)
    for module in network.modules():
        if type(module) is nn.Linear:
            use_class(module, CastLinear)
        if type(module) is TokenEmbedding:
            use_class(module, FusedEmbedding)
    if network.embedding is not None:
        network.embedding.register_forward_hook(lambda _module, _args, x_BTC: x_BTC.to(torch.bfloat16))


def compute_in_fp8(
    network: Network,
    new_scaling: Callable[[dict[str, torch.dtype]], Scaling],
    fp8_fast_accum: bool = False,
    fp8_experts: bool = True,
) -> None:
    """Make a network compute the GEMMs of its layers in fp8 and the rest in bf16.

    Without `fp8_experts` the grouped GEMMs of experts belong to the rest.
    """
    if fp8_experts:
        for module in network.layers.modules():
            if isinstance(module, GroupedLinear):
                use_class(module, Fp8GroupedLinear, fp8_fast_accum=fp8_fast_accum)
    names = operand_names(network)
    dtypes = {name: dtype for operands in names.values() for name, dtype in operands.dtypes.items()}
    network.fp8_scaling = new_scaling(dtypes)
    for path, operands in names.items():
        settings = {"scaling": network.fp8_scaling, "operands": operands, "fp8_fast_accum": fp8_fast_accum}
        use_class(network.get_submodule(path), Fp8Linear, **settings)
    compute_in_bf16(network)


def operand_names(network: Network) -> dict[str, OperandNames]:
    """Return the names of the fp8 tensors of each linear layer in `layers`, by the layer's path in the whole model."""
    paths = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    paths = [path for path in paths if path.startswith("layers.")]
    return {path: OperandNames(f"{_input_owner(path, paths)}.x", f"{path}.weight", f"{path}.dy") for path in paths}


def _input_owner(path: str, paths: Iterable[str]) -> str:
    """Return the first of the linear layers that read the same activation as this one."""
    block, _, name = path.rpartition(".")
    group = next((group for group in SHARED_INPUTS if name in group), (name,))
    return next(owner for owner in (f"{block}.{member}" for member in group) if owner in paths)


def amax_reduction(mesh: Mesh, recipe: str) -> Any:
    """Return how a recipe reduces the amaxes of a pipeline stage over ranks; None: this rank has all tensors whole.

    Delayed scales are those of all tokens of a step. Current ones are those of a micro-batch, which is on the ranks of
    cp and tp. Of many scales per tensor, those of a token are shared by the ranks of tp, which divide channels, and
    those of a channel by the ranks of cp, which divide tokens.
    """
    if mesh.dense is None or mesh.stage is None:
        return None
    if recipe in VECTOR_SCALINGS:
        return RankReductions(*(_max_over([mesh.submesh(name)]) for name in ("tp", "cp")))
    return _max_over([mesh.stage] if recipe == "tensorwise_delayed" else [mesh.submesh("cp"), mesh.submesh("tp")])


def _max_over(meshes: Iterable[DeviceMesh]) -> ReduceMax | None:
    groups = [each.get_group() for each in meshes if each.size() > 1]
    return partial(_all_reduce_max, groups) if groups else None


def _all_reduce_max(groups: Iterable[dist.ProcessGroup], tensor: Tensor) -> None:
    for group in groups:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)


def check_fp8_device(
    network: Network, device: torch.device, fp8_experts: bool = True, recipe: str | None = None
) -> None:
    """Raise a ConfigError if a GPU has no fp8 GEMMs that the network needs."""
    if device.type != "cuda":
        return
    check_dtypes(device, dtype="fp8")
    gpu = capabilities(device)
    if recipe == "blockwise" and not gpu.supports("fp8_block_gemm"):
        raise ConfigError(
            "fp8_recipe=blockwise needs a GPU of compute capability 9.0 (Hopper) and CUDA 12.9 or later, here are "
            f"{'.'.join(map(str, gpu.compute or ()))} and {'.'.join(map(str, gpu.cuda))}; choose rowwise"
        )
    has_experts = any(isinstance(module, GroupedLinear) for module in network.modules())
    if fp8_experts and has_experts and not gpu.has("fp8_grouped_gemm"):
        raise ConfigError(
            "dtype=fp8 with experts needs a GPU of compute capability 9.0 (Hopper), this one has "
            f"{'.'.join(map(str, gpu.compute or ()))}; set fp8_experts=false, which computes them in bf16"
        )


def cache_fp8_weights(network: Network) -> None:
    """Cache fp8 expert weights that stay in memory for the step; call it after allocation."""
    for experts in fp8_grouped_linears(network):
        if isinstance(experts.weight, BucketParameter) and experts.weight.bucket.resident:
            experts.fp8_cache = Fp8WeightCache()


def fp8_grouped_linears(network: nn.Module) -> list[Fp8GroupedLinear]:
    """Return the experts that are in fp8."""
    return [module for module in network.modules() if isinstance(module, Fp8GroupedLinear)]
