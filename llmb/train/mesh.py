"""Which rank this process is, on which device, and how it talks to the others.

torchrun (or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT) starts the ranks; without
it the process is the only one. NCCL connects GPUs and gloo CPUs.

Ranks leave the group by ending. To destroy it first could hang: gloo's destructor holds the interpreter's lock while it
waits for a thread that may be waiting for that lock.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.errors import ConfigError
from llmb.spec import RunConfig


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all."""

    rank: int
    world_size: int
    device: torch.device

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks of a small tensor; does not wait for the device."""
        if self.world_size > 1:
            dist.all_reduce(value)
            value /= self.world_size
        return value


def open_mesh(config: RunConfig) -> Mesh:
    """Find this rank's device and join the other ranks."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    asked = config.parallel.world_size
    if world_size != asked:
        raise ConfigError(
            f"the configuration spreads over {asked} ranks but {world_size} started; "
            f"start it with: torchrun --nproc-per-node {asked} -m llmb.train config.json"
        )
    device = _device(config.machine.gpu, int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return Mesh(rank, world_size, device)


def _device(gpu: str, local_rank: int) -> torch.device:
    if gpu == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise ConfigError(
            f"machine.gpu={gpu} needs a CUDA device for local rank {local_rank}, but torch {torch.__version__} "
            f"sees {visible}; machine.gpu=cpu runs on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
