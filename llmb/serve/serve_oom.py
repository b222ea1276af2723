"""Memory that runs out, and a cache too small for a request: named, with what would fit, computed for this run."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.serving_capacity import advice, room, token_bytes, weight_bytes
from llmb.runtime.process_memory import bytes_asked, is_out_of_memory, peak_bytes
from llmb.runtime.run_ending import OutOfMemory
from llmb.serve.benchmark.prompts import Prompt
from llmb.serve.engine_builder import HOST_SHARE

LEAST_LACKING = 0.02  # of what is free, where the error does not say how much was asked for


@contextmanager
def naming_shortage(device: torch.device, config: RunConfig) -> Iterator[None]:
    """Whatever form a lack of memory takes inside, it leaves as OutOfMemory with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        total = total_bytes(device)
        peak = f"out of memory at a peak of {_gib(peak_bytes(device))} of {_gib(total)}"
        raise OutOfMemory(f"{peak}: {remedy(config, total, bytes_asked(error))}") from error


def total_bytes(device: torch.device) -> int:
    """Memory of the GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> float:
    """What nobody has taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_SHARE


def remedy(config: RunConfig, total: float, asked: float) -> str:
    """What to change. `asked`: bytes of the allocation that failed, lacking even where by estimate all would fit."""
    weights = weight_bytes(config)
    free = total - weights
    if free <= 0:
        return f"the weights alone need about {_gib(weights)}; take more GPUs (TP, PP, EP) or a smaller dtype"
    here = room(config, free)
    if here.requests == 0 or here.lacking:
        return advice(config, free)
    work = _work(config)
    lacking = max(asked, LEAST_LACKING * free)
    fraction = math.floor((work.kv_fraction - lacking / free) * 100) / 100
    ways = [f"KV_CACHE_FRACTION={fraction:.2f}"] if fraction * free >= here.request else []
    if work.max_batch_size > 1:
        ways.append(f"MAX_BATCH_SIZE={work.max_batch_size // 2}")
    if work.max_num_tokens // 2 >= max(work.max_batch_size, 1 if work.chunked_prefill else work.isl):
        ways.append(f"MAX_NUM_TOKENS={work.max_num_tokens // 2}")
    said = " or ".join(ways) if ways else "more GPUs (TP, PP, EP) or a smaller dtype"
    return f"by estimate it fits, so what is lacking is little: try {said}"


def check_room(config: RunConfig, device: torch.device, blocks: int, prompts: Iterable[Prompt]) -> None:
    """A ConfigError with advice where the cache, of so many blocks, cannot hold the longest request even alone."""
    work = _work(config)
    longest = max(prompts, key=lambda prompt: prompt.total, default=None)
    if longest is None or longest.total - 1 <= blocks * work.block_tokens:  # the last token is never put in
        return
    isl, osl = len(longest.tokens), longest.output_tokens
    longest_alone = replace(config, workload=replace(work, isl=isl, osl=osl))
    free = free_bytes(device) + blocks * work.block_tokens * token_bytes(config)
    raise ConfigError(
        f"the KV cache of {blocks * work.block_tokens} tokens is too small for a request of {isl}+{osl}: "
        f"{advice(longest_alone, free)}"
    )


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def _gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"
