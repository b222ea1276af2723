"""Weight initialization of the shards that this rank holds.

The values of a parameter depend only on the seed and its name. A rank draws the whole parameter and keeps its shard, so
every layout starts from the same model, and no rank needs memory for more than one whole parameter.
"""

import torch

from llmb.models.architectures import Network
from llmb.models.decoder import parameter_generator
from llmb.train.parallel.fsdp import ShardedParameters
from llmb.train.parallel.parameter_shard import box_of, shard_of


@torch.no_grad()
def init_weights(model_part: Network, sharded: ShardedParameters, seed: int, device: torch.device) -> None:
    """Initialize the allocated parameters of a model part, in fp32 before they are rounded."""

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        whole = torch.empty(shape, device=device)
        model_part.init_parameter(name, whole, parameter_generator(seed, name, device))
        return whole

    for bucket in sharded.buckets:
        for number, (name, parameter) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
            bucket.set_weight(number, draw(name, parameter.shard.shape))
    for group in sharded.replicated:
        for name, weight in group.parameters.items():
            shard = shard_of(weight)
            weight.copy_(box_of(draw(name, shard.shape), shard, weight.shape))
