"""Rank, world size and device of this process, and the initialization of its process group.

torchrun (or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT) starts the ranks; without
it there is one process. The backend is NCCL for GPUs and gloo for CPUs. A rank that runs alone needs no launcher and no
network: `local_group.py`.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from llmb.config.spec import OneRank, RunConfig
from llmb.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """Rank, world size and device of this process."""

    rank: int
    world_size: int
    device: torch.device


def init_distributed(config: RunConfig, engine: str) -> RankInfo:
    """Select this rank's device and initialize the process group."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if config.one_rank is not None:
        return _init_alone(config, config.one_rank, world_size)
    expected = config.parallel.world_size
    if world_size != expected:
        raise ConfigError(
            f"the configuration needs {expected} ranks but {world_size} started; "
            f"start it with: torchrun --nproc-per-node {expected} -m {engine} config.json"
        )
    device = _device(config.machine.gpu, int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1 and device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif world_size > 1:
        dist.init_process_group("gloo")
    return RankInfo(rank, world_size, device)


def _init_alone(config: RunConfig, one_rank: OneRank, processes: int) -> RankInfo:
    """Initialize a process group in which the other ranks do not exist."""
    if processes != 1:
        raise ConfigError(
            f"one_rank: one rank runs alone, but {processes} processes started; start it without torchrun"
        )
    from llmb.runtime.local_group import LOCAL

    world_size = config.parallel.world_size
    device = _device(one_rank.machine.gpu, 0)
    dist.init_process_group(LOCAL, rank=one_rank.rank, world_size=world_size, store=dist.HashStore())
    return RankInfo(one_rank.rank, world_size, device)


def _device(gpu: str, local_rank: int) -> torch.device:
    if gpu == "cpu":
        return torch.device("cpu")
    if torch.version.hip is not None:
        raise ConfigError(
            f"machine.gpu={gpu}: torch {torch.__version__} is for AMD GPUs, which this engine does not use; "
            "machine.gpu=cpu runs on the CPU"
        )
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise ConfigError(
            f"machine.gpu={gpu} needs a CUDA device for local rank {local_rank}, but torch {torch.__version__} "
            f"sees {visible}; machine.gpu=cpu runs on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
