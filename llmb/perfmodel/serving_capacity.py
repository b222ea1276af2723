"""Serving memory of a rank: weights, workspace of a step, KV cache, and which settings would do.

    cache_capacity(config, free_bytes)   tokens and whole requests that the cache holds at the run's KV fraction
    advice(config, free_bytes)           which KV_CACHE_FRACTION, MAX_BATCH_SIZE or MAX_NUM_TOKENS would do, in a line

`free_bytes` is the memory left after loading the weights: measured by the engine, or estimated before the run. The
activations of a step are subtracted first; the cache takes kv_fraction of the rest. All numbers are those of the rank
that needs most. Layers with a sliding window hold the blocks that a next token sees, where that leaves more to the
others (`serving_time/cache_blocks.py`).
"""

import math
from dataclasses import dataclass

from llmb.config.native.speculation import draft_config
from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import Inference, RunConfig
from llmb.perfmodel.block_costs import BLOCK_COSTS, block_stack
from llmb.perfmodel.hardware import GIB, memory_bytes, with_article
from llmb.perfmodel.params import (
    BYTES,
    bytes_per_value,
    dense_bytes_per_value,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from llmb.perfmodel.serving_time.cache_blocks import sequence_window_blocks, split_blocks, window_blocks
from llmb.perfmodel.shards import StageShape, Weight, end_weights, layer_blocks, layer_weights

FRACTION_STEP = 0.01  # granularity of a suggested KV fraction
MAX_FRACTION = 0.97  # highest suggested KV fraction: the largest published one


@dataclass(frozen=True, kw_only=True)
class CacheCapacity:
    """Use of the memory that the weights leave, in bytes."""

    free: float
    workspace: float  # activations of a step; estimated
    cache: float  # for cached tokens and states: kv_fraction of the rest
    token: float  # one cached token
    request: float  # one whole request, its state included
    tokens: int  # number that the cache holds besides the states of a full batch
    requests: int  # number of whole ones that it holds, with their states

    @property
    def missing(self) -> float:
        """Bytes that a step alone needs beyond the free memory."""
        return max(0.0, self.workspace - self.free)


def weight_bytes(config: RunConfig) -> float:
    """Return the weights of the rank with the most: matrices in the run's dtype, everything else in bf16 or wider.

    A draft model's count too. Leaves out scales, and replicated KV heads where there are fewer of them than ranks.
    """
    draft = draft_config(config)
    stages = stage_layers(config.model.layers, config.parallel.pp, None)
    last = len(stages) - 1
    target = max(_stage_bytes(config, layers, index == 0, index == last) for index, layers in enumerate(stages))
    return target if draft is None else target + weight_bytes(draft)


def _stage_bytes(config: RunConfig, layers: range, first: bool, last: bool) -> float:
    """Return the weights of one pipeline stage on one rank."""
    model = config.model
    gemm_bytes, dense_bytes = (size(config.precision.dtype) for size in (bytes_per_value, dense_bytes_per_value))
    other_bytes = max(gemm_bytes, BYTES["bf16"])
    stage = StageShape(layers=layers, first=first, last=last, recomputed=0, offloaded=0)
    # The embedding is replicated, as each rank looks up its own tokens; the head is split like a dense layer.
    embedding, head = model.vocab * model.hidden, model.vocab * model.hidden / _tensor_ranks(config)
    matrices = embedding * first + head * (last and not (first and model.tied_embeddings))
    total = other_bytes * (matrices + sum(w.size for w in end_weights(model, stage) if len(w.shape) == 1))
    for layer in layers:
        for weight in layer_weights(model, layer):
            matrix_bytes = gemm_bytes if weight.routed else dense_bytes
            is_quantized = weight.is_matrix and (len(weight.shape) > 2 or not weight.routed)  # biases are not
            total += _on_rank(config, weight) * (matrix_bytes if is_quantized else other_bytes)
    return total


def _on_rank(config: RunConfig, weight: Weight) -> float:
    """Return the number of values of a weight on one rank."""
    if weight.routed:  # experts over ep, each one's width over the other ranks
        return weight.size / config.parallel.tp
    return weight.size if weight.shard_dim is None else weight.size / _tensor_ranks(config)


def _tensor_ranks(config: RunConfig) -> int:
    """Return the number of ranks that share each request, and split all weights but the routed experts."""
    return 1 if _inference(config).attention_dp else config.parallel.tp


def token_bytes(config: RunConfig) -> float:
    """Return the KV cache of one token on the stage with the most, with that of a draft model.

    MLA latents are replicated.
    """
    model, ranks, draft = config.model, _tensor_ranks(config), draft_config(config)
    shards = 1 if model.mla else min(ranks, model.kv_heads)
    target = kv_bytes_per_token(model, config.precision.kv_dtype) * _stage_fraction(config, "kv_values") / shards
    return target if draft is None else target + token_bytes(draft)


def window_token_bytes(config: RunConfig) -> float:
    """Return the part of `token_bytes` in layers with a sliding window, whose blocks are freed behind it.

    Zero where they keep whole sequences: no request is much longer than the window, or prefixes are shared.
    """
    return token_bytes(config) * _window_fraction(config) if _window_blocks(config) else 0.0


def _window_fraction(config: RunConfig) -> float:
    """Return the windowed fraction of the KV cache; leaves out that pipeline stages may differ in it."""
    model = config.model
    cached = sum(count for _, count, block in block_stack(model) if block.kv_values)
    return model.window_layers / cached if cached else 0.0


def _window_blocks(config: RunConfig) -> int:
    """Return the blocks that windowed layers need for a full batch; 0: they keep whole sequences."""
    work = _inference(config)
    return window_blocks(
        window=config.model.window if config.model.window_layers and not work.prefix_cache else None,
        block_tokens=work.block_tokens,
        max_seq_len=work.isl + work.osl,
        max_batch_size=work.max_batch_size,
        max_num_tokens=work.max_num_tokens,
    )


def request_bytes(config: RunConfig) -> float:
    """Return the cache of one whole request, its state included, with windowed layers that free their blocks."""
    work, windowed = _inference(config), window_token_bytes(config)
    full = _whole_tokens(work) * (token_bytes(config) - windowed)
    return full + _held_window_tokens(config) * windowed + state_bytes(config)


def _held_window_tokens(config: RunConfig) -> int:
    """Return the slots of a request in windowed layers: those of its window, and a block of its next chunk."""
    window, block_tokens = config.model.window, _inference(config).block_tokens
    return 0 if window is None else (sequence_window_blocks(window, block_tokens) + 1) * block_tokens


def state_bytes(config: RunConfig) -> float:
    """Return the recurrent state of a request, in fp32, on the stage with the most."""
    total = state_bytes_per_sequence(config.model)
    return total * _stage_fraction(config, "state_values") / _tensor_ranks(config)


def _stage_fraction(config: RunConfig, values: str) -> float:
    """Return the fraction of all layers' values that is on the pipeline stage with the most."""
    model = config.model
    stages = stage_layers(model.layers, config.parallel.pp, None)
    if len(stages) == 1:
        return 1.0
    per_stage = [
        sum(getattr(BLOCK_COSTS[kind](model), values) for layer in layers for kind in layer_blocks(model, layer))
        for layers in stages
    ]
    return max(per_stage) / sum(per_stage) if sum(per_stage) else 0.0


def workspace_bytes(config: RunConfig) -> float:
    """Return the activations of a step at max_num_tokens, and the logits of a full batch."""
    return _inference(config).max_num_tokens * _step_bytes_per_token(config) + _logit_bytes(config)


def _step_bytes_per_token(config: RunConfig) -> float:
    """Return the bytes of the residual and of the widest block's values.

    With attention data parallelism every rank also has the other ranks' tokens before its experts and their outputs.
    """
    model = config.model
    widest = max(block.saved_values for _, _, block in block_stack(model)) / _tensor_ranks(config)
    exchanged = 2 * model.hidden * (config.parallel.tp - 1) if _inference(config).attention_dp and model.experts else 0
    return (2 * model.hidden + widest + exchanged) * BYTES["bf16"]


def _logit_bytes(config: RunConfig) -> float:
    work = _inference(config)
    return work.max_batch_size * (1 + work.speculative_tokens) * config.model.vocab * BYTES["fp32"]


def free_bytes(config: RunConfig) -> float | None:
    """Return the GPU memory that the weights leave, estimated; None when the memory is unknown."""
    memory = memory_bytes(config.machine)
    return None if memory is None else max(0.0, memory - weight_bytes(config))


def cache_capacity(config: RunConfig, free_bytes: float) -> CacheCapacity:
    """Return what fits into the free memory at the run's KV fraction."""
    work = _inference(config)
    token, state, workspace = token_bytes(config), state_bytes(config), workspace_bytes(config)
    cache = work.kv_fraction * max(0.0, free_bytes - workspace)
    # Blocks freed behind windows count only if a batch of such requests is larger than one of whole sequences.
    whole, trimmed = _whole_tokens(work) * token + state, request_bytes(config)
    chunks = work.max_num_tokens * window_token_bytes(config)  # of a step, until the next
    requests, request = max((cache // whole, whole), (max(0.0, cache - chunks) // trimmed, trimmed))
    return CacheCapacity(
        free=free_bytes,
        workspace=workspace,
        cache=cache,
        token=token,
        request=request,
        tokens=_cached_tokens(config, cache),
        requests=int(requests),
    )


def _cached_tokens(config: RunConfig, cache: float) -> int:
    """Return how many tokens the cache holds besides the states of a full batch, one more for padding."""
    work, token, windowed = _inference(config), token_bytes(config), window_token_bytes(config)
    available = max(0.0, cache - (work.max_batch_size + 1) * state_bytes(config))
    if not windowed:
        return int(available // token) if token else 0
    full_batch = work.max_batch_size * _whole_tokens(work) // work.block_tokens
    sizes = (work.block_tokens * (token - windowed), work.block_tokens * windowed)
    return work.block_tokens * split_blocks(available, *sizes, _window_blocks(config), full_batch).full


def requested_cache_bytes(config: RunConfig) -> float:
    """Return the cache of as many whole requests as one rank may run at once."""
    work = _inference(config)
    schedulers = config.parallel.tp if work.attention_dp else 1
    requests = min(-(-work.concurrency // schedulers), work.max_batch_size)
    windowed, tokens = window_token_bytes(config), work.isl + work.osl
    held = tokens * (token_bytes(config) - windowed) + min(tokens, _held_window_tokens(config)) * windowed
    return requests * (held + state_bytes(config))


def misfit(config: RunConfig) -> str | None:
    """Return why not even one request would do on the GPU, and what would; None if it would, or nobody knows."""
    free = free_bytes(config)
    if free is None:
        return None
    if free == 0:
        return (
            f"the weights of {config.model.name} in {config.precision.dtype} need {_gib(weight_bytes(config))} a GPU, "
            f"which is more than {with_article(config.machine.gpu)} has; use more GPUs (TP, PP, EP) or a smaller dtype"
        )
    capacity = cache_capacity(config, free)
    if capacity.requests == 0 or _states_fill_cache(config, capacity):
        return advice(config, free)
    return None


def _states_fill_cache(config: RunConfig, capacity: CacheCapacity) -> bool:
    """Return whether the states of a full batch leave no space for one request's tokens."""
    return capacity.token > 0 and capacity.tokens < _whole_tokens(_inference(config))


def advice(config: RunConfig, free_bytes: float) -> str:
    """Return one line with the numbers: what to change so that the run fits, or that it does."""
    work, capacity = _inference(config), cache_capacity(config, free_bytes)
    lengths = f"{work.isl}+{work.osl} tokens"
    if capacity.requests == 0:
        return (
            f"one request of {lengths} needs {_gib(capacity.request)} of cache, "
            f"KV_CACHE_FRACTION={work.kv_fraction:g} of the {_gib(max(0.0, capacity.free - capacity.workspace))} "
            f"left by a step of {work.max_num_tokens} tokens is {_gib(capacity.cache)}; "
            f"{_for_one_request(config, capacity)}"
        )
    if _states_fill_cache(config, capacity):
        states = _gib((work.max_batch_size + 1) * state_bytes(config))
        remedy = f"MAX_BATCH_SIZE={capacity.requests - 1} would do" if capacity.requests > 1 else "use more GPUs"
        return (
            f"the states of a batch of {work.max_batch_size} need {states} of {_gib(capacity.cache)} of cache; {remedy}"
        )
    if capacity.requests < min(work.max_batch_size, work.concurrency):
        return (
            f"the cache holds {capacity.requests} whole requests of {lengths}, so some of a batch of "
            f"{work.max_batch_size} wait; MAX_BATCH_SIZE={capacity.requests} or more GPUs would do"
        )
    return f"fits: {capacity.requests} whole requests of {lengths} ({capacity.tokens:,} tokens)"


def _for_one_request(config: RunConfig, capacity: CacheCapacity) -> str:
    """Return the first remedy: a larger fraction, a smaller step or batch, or shorter requests."""
    spare = capacity.free - capacity.workspace
    fraction_needed = math.ceil(capacity.request / spare / FRACTION_STEP) * FRACTION_STEP if spare > 0 else math.inf
    if fraction_needed <= MAX_FRACTION:
        return f"KV_CACHE_FRACTION={fraction_needed:.2f} would do"
    for fraction in (_inference(config).kv_fraction, MAX_FRACTION):
        if smaller := _smaller_step(config, capacity.free - capacity.request / fraction):
            raised = "" if fraction == _inference(config).kv_fraction else f"KV_CACHE_FRACTION={fraction:.2f} with "
            return f"{raised}{smaller} would do"
    block = capacity.token * _inference(config).block_tokens
    tokens = int(MAX_FRACTION * spare // block) * _inference(config).block_tokens if block else 0
    shorter = f"requests of at most {tokens} tokens at KV_CACHE_FRACTION={MAX_FRACTION}, " if tokens > 0 else ""
    return f"use {shorter}more GPUs or a smaller dtype"


def _smaller_step(config: RunConfig, available: float) -> str | None:
    """Return a token budget or batch with which a step takes at most `available` bytes."""
    work = _inference(config)
    fewest = work.max_batch_size if work.chunked_prefill else max(work.max_batch_size, work.isl)
    tokens = int((available - _logit_bytes(config)) // _step_bytes_per_token(config))
    if fewest <= tokens < work.max_num_tokens:
        return f"MAX_NUM_TOKENS={tokens}"
    row = _logit_bytes(config) / work.max_batch_size
    batch = int((available - work.max_num_tokens * _step_bytes_per_token(config)) // row)
    return f"MAX_BATCH_SIZE={batch}" if 1 <= batch < work.max_batch_size else None


def _whole_tokens(work: Inference) -> int:
    """Return the cache slots of a whole request: blocks are not shared."""
    return -(-(work.isl + work.osl) // work.block_tokens) * work.block_tokens


def _inference(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def _gib(number: float) -> str:
    return f"{number / GIB:.3g} GiB"
