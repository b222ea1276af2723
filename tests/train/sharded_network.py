"""Networks with initialized weights, given the parameters of training.

sharded = shard(network, BF16)
network(tokens, labels).backward()
sharded.end_step()
Optimizer([sharded], ONE).update(lr)
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from llmb.train.parallel.bucket import Bucket, BucketFormats
from llmb.train.parallel.fsdp import ShardedParameters
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.parameter_shard import shard_of

ONE = Mesh(0, 1, torch.device("cpu"))
FP32 = BucketFormats(torch.float32, False, torch.float32, torch.float32)
BF16 = BucketFormats(torch.bfloat16, True, torch.float32, torch.float32)


def shard(module: nn.Module, formats: BucketFormats = FP32, mesh: Mesh = ONE) -> ShardedParameters:
    """Move the weights of a module, which are whole, into buckets."""
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    sharded = ShardedParameters(module, mesh, formats, mesh.device)
    sharded.set_weights(lambda name, _shape: weights[name])
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    return sharded


Box = tuple[str, tuple[int, ...], Tensor]  # name of a parameter, offset and values of a box of it


def own_boxes(sharded: ShardedParameters, flat: Callable[[Bucket], Tensor], of: Callable[..., Tensor]) -> Iterator[Box]:
    """Yield what this rank has of values in the shape of the shards, and of replicated parameters."""
    for bucket in sharded.buckets:
        for number, name in enumerate(bucket.names):
            yield from ((name, offset, box.clone()) for offset, box in bucket.own_boxes(flat(bucket), number))
    for group in sharded.replicated:
        for name, parameter in group.parameters.items():
            yield name, shard_of(parameter).offset, of(parameter).detach().clone()


def own_weights(sharded: ShardedParameters) -> Iterator[Box]:
    """Yield the boxes of weights that this rank's optimizer updates, in fp32."""
    return own_boxes(sharded, lambda bucket: bucket.master_weights(), lambda parameter: parameter)


def own_gradients(sharded: ShardedParameters) -> Iterator[Box]:
    """Yield the boxes of reduced gradients."""
    return own_boxes(sharded, lambda bucket: bucket.reduced_grad, lambda parameter: parameter.grad)


def fp32_weights(sharded: ShardedParameters) -> dict[str, Tensor]:
    """Return the weights of one process, in fp32."""
    boxes = {name: box for name, _, box in own_weights(sharded)}
    return {name: boxes[name].view(parameter.shape) for name, parameter in sharded.parameters.items()}
