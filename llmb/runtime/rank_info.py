"""Which of the run's processes this one is, on which device; and how they come to know one another.

torchrun (or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT) starts the ranks; without
it the process is the only one. NCCL connects GPUs and gloo CPUs.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """This process among all of its run."""

    rank: int
    world_size: int
    device: torch.device


def join_ranks(config: RunConfig, engine: str) -> Place:
    """Find this rank's device and join the other ranks."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    asked = config.parallel.world_size
    if world_size != asked:
        raise ConfigError(
            f"the configuration spreads over {asked} ranks but {world_size} started; "
            f"start it with: torchrun --nproc-per-node {asked} -m {engine} config.json"
        )
    device = _device(config.machine.gpu, int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1 and device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif world_size > 1:
        dist.init_process_group("gloo")
    return Place(rank, world_size, device)


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
