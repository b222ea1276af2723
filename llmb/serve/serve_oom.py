"""Errors for out of memory and for a KV cache too small for a request, with advice computed for this run."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.loadgen.prompt_sampler import Prompt
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.serving_capacity import advice, cache_capacity, token_bytes, weight_bytes, window_token_bytes
from llmb.runtime.process_memory import explain_oom, peak_bytes, requested_bytes
from llmb.serve.engine_builder import HOST_MEMORY_FRACTION

MIN_MISSING_FRACTION = 0.02  # of the free memory, if the error does not say how much was requested


@contextmanager
def report_oom(device: torch.device, config: RunConfig) -> Iterator[None]:
    """Convert any out-of-memory error inside to OutOfMemory with advice."""

    def message(error: Exception) -> str:
        total = total_bytes(device)
        peak = f"out of memory at a peak of {_gib(peak_bytes(device))} of {_gib(total)}"
        return f"{peak}: {oom_advice(config, total, requested_bytes(error))}"

    with explain_oom(message):
        yield


def total_bytes(device: torch.device) -> int:
    """Return the memory of the GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_MEMORY_FRACTION


def oom_advice(config: RunConfig, total: float, requested: float) -> str:
    """Return what to change. `requested`: bytes of the failed allocation, missing even if all fits by estimate."""
    weights = weight_bytes(config)
    free = total - weights
    if free <= 0:
        return f"the weights alone need about {_gib(weights)}; use more GPUs (TP, PP, EP) or a smaller dtype"
    capacity = cache_capacity(config, free)
    if capacity.requests == 0 or capacity.missing:
        return advice(config, free)
    work = _work(config)
    missing = max(requested, MIN_MISSING_FRACTION * free)
    fraction = math.floor((work.kv_fraction - missing / free) * 100) / 100
    options = [f"KV_CACHE_FRACTION={fraction:.2f}"] if fraction * free >= capacity.request else []
    if work.max_batch_size > 1:
        options.append(f"MAX_BATCH_SIZE={work.max_batch_size // 2}")
    if work.max_num_tokens // 2 >= max(work.max_batch_size, 1 if work.chunked_prefill else work.isl):
        options.append(f"MAX_NUM_TOKENS={work.max_num_tokens // 2}")
    advised = " or ".join(options) if options else "more GPUs (TP, PP, EP) or a smaller dtype"
    return f"it fits by estimate, so little memory is missing: try {advised}"


def check_cache_capacity(config: RunConfig, device: torch.device, blocks: int, prompts: Iterable[Prompt]) -> None:
    """Raise a ConfigError with advice if a cache of so many blocks cannot hold the longest request alone."""
    work = _work(config)
    longest = max(prompts, key=lambda prompt: prompt.num_tokens, default=None)
    if longest is None or longest.num_tokens - 1 <= blocks * work.block_tokens:  # the last token is never cached
        return
    isl, osl = len(longest.tokens), longest.output_tokens
    longest_config = replace(config, workload=replace(work, isl=isl, osl=osl))
    full_bytes = token_bytes(config) - window_token_bytes(longest_config)
    free = free_bytes(device) + blocks * work.block_tokens * full_bytes
    raise ConfigError(
        f"the KV cache of {blocks * work.block_tokens} tokens is too small for a request of {isl}+{osl}: "
        f"{advice(longest_config, free)}"
    )


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def _gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"
