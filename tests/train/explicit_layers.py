"""Llama layers on this rank of a layout, built by the passes of training: what they compute of given inputs.

part = explicit_part(MODEL, "bf16", mesh, mbs=2)
result = run_layers(part, x_BTC, dy_BTC, mesh)          # on this rank
full_result([result, ...], Parallel(tp=2, cp=2))        # of all ranks
"""

from dataclasses import dataclass

import torch
from config_changes import changed
from sharded_network import Box, own_gradients
from small_config import CONFIG
from torch import Tensor

from llmb.config.model import Model
from llmb.config.spec import Parallel
from llmb.models.llama import Llama
from llmb.train.llama_layers import begin_step, explicit_layers
from llmb.train.parallel.bucket import BucketFormats
from llmb.train.parallel.context_parallel import chunk_indices, shard_sequence
from llmb.train.parallel.fsdp import ShardedParameters, sharded_parameters
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.parameter_shard import ParameterShard, box_of
from llmb.train.parallelize import apply_passes, bucket_formats


@dataclass
class LayersResult:
    """Output of the layers, gradient of their input, and the gradients of their weights that a rank has."""

    out_BTC: Tensor
    dx_BTC: Tensor
    grads: list[Box]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a full result by name."""
        return {"out": self.out_BTC, "dx": self.dx_BTC, **{name: grad for name, _, grad in self.grads}}


def worst_error(actual: LayersResult, expected: LayersResult) -> float:
    """Return the largest relative error of a tensor of full results."""
    tensors, reference = actual.tensors(), expected.tensors()
    assert tensors.keys() == reference.keys()
    return max(float((tensors[name] - x).double().norm() / x.double().norm()) for name, x in reference.items())


def plain_network(model: Model) -> Llama:
    """Return a network with weights large enough that every part of the gradient matters, and norms other than one."""
    network = Llama(model)
    generator = torch.Generator().manual_seed(7)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, 0.15, generator=generator)
        if parameter.ndim == 1:
            parameter.data += 1
    return network


def explicit_part(
    model: Model,
    dtype: str,
    mesh: Mesh,
    weights_stay: bool = True,
    formats: BucketFormats | None = None,
    **changes: object,
) -> Llama:
    """Return this rank's part of the plain network, with explicit layers."""
    network = plain_network(model)
    weights = dict(network.named_parameters())
    config = changed(CONFIG, model=model, parallel=mesh.parallel, dtype=dtype, ga=2, **changes)
    apply_passes(network, config, config.workload, mesh)
    sharded = ShardedParameters(network, mesh, formats or bucket_formats(config, config.workload), mesh.device)
    sharded.set_weights(lambda name, _shape: weights[name])
    for layer in explicit_layers(network):
        layer.weights_stay = weights_stay
    begin_step(network)
    return network


def run_layers(part: Llama, x_BTC: Tensor, dy_BTC: Tensor, mesh: Mesh) -> LayersResult:
    """Run this rank's tokens of full sequences through explicit layers, forward and backward."""
    out_BTC, dx_BTC = forward_backward(part, *(_tokens(x, mesh) for x in (x_BTC, dy_BTC)))
    sharded = sharded_parameters(part)
    sharded.end_backward()
    sharded.end_step()
    return LayersResult(out_BTC, dx_BTC, [box for box in own_gradients(sharded) if box[0].startswith("layers.")])


def forward_backward(part: Llama, x_BTC: Tensor, dy_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of the layers and the gradient of their input."""
    x_BTC.requires_grad_()
    out_BTC = part.run_layers(x_BTC)
    out_BTC.backward(dy_BTC)
    assert x_BTC.grad is not None
    return out_BTC.detach(), x_BTC.grad


def _tokens(x_BTC: Tensor, mesh: Mesh) -> Tensor:
    return shard_sequence(x_BTC, mesh).chunk(mesh.size("tp"), dim=1)[mesh.index("tp")].clone()


def full_result(model: Model, ranks: list[LayersResult], parallel: Parallel) -> LayersResult:
    """Return what one rank would have computed, given the results of (cp, tp) ranks."""

    def sequences(name: str) -> Tensor:
        chunks: dict[int, Tensor] = {}
        for index in range(parallel.cp):
            shards = ranks[index * parallel.tp : (index + 1) * parallel.tp]
            x_BTC = torch.cat([getattr(shard, name) for shard in shards], dim=1)
            chunks |= dict(zip(chunk_indices(index, parallel.cp), x_BTC.chunk(2, dim=1), strict=True))
        return torch.cat([chunks[index] for index in sorted(chunks)], dim=1)

    grads = {name: torch.zeros_like(p) for name, p in plain_network(model).named_parameters() if "layers." in name}
    for name, offset, values in (box for rank in ranks for box in rank.grads):
        box_of(grads[name].data, ParameterShard((), offset), values.shape).copy_(values)
    whole = [(name, (0,) * grad.ndim, grad) for name, grad in grads.items()]
    return LayersResult(sequences("out_BTC"), sequences("dx_BTC"), whole)
