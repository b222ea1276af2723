"""How much memory serving needs on a rank, and what would fit: weights, a step's workspace, the cache of requests.

    room(config, free_bytes)      how many tokens and whole requests the cache holds at the run's KV fraction
    advice(config, free_bytes)    which KV_CACHE_FRACTION, MAX_BATCH_SIZE or MAX_NUM_TOKENS would fit, in one line

`free_bytes` is what a rank has left once its weights are there: measured by the engine, or estimated before the run.
A step's activations come off first; of what then is left the cache takes kv_fraction. All are the fullest rank's.
"""

import math
from dataclasses import dataclass

from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import Inference, Model, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.flops import BLOCKS, BYTES, bytes_of, kv_bytes_per_token, stack, state_bytes_per_sequence
from llmb.perfmodel.hardware import GIB, gpu
from llmb.perfmodel.shards import Part, Weight, end_weights, layer_blocks, layer_weights

FINEST = 0.01  # steps in which a KV fraction is proposed
MOST = 0.97  # the highest that is proposed: the largest of the published ones


@dataclass(frozen=True, kw_only=True)
class Room:
    """What becomes of the memory that the weights leave."""

    free: float  # bytes
    workspace: float  # a step's activations need these; estimated
    cache: float  # for cached tokens and states: kv_fraction of the rest
    token: float  # bytes of one cached token
    request: float  # bytes of one whole request, its state included
    tokens: int  # that the cache holds beside the states of a full batch
    requests: int  # whole ones it holds, with their states

    @property
    def lacking(self) -> float:
        """Bytes that a step alone needs beyond what is free."""
        return max(0.0, self.workspace - self.free)


def weight_bytes(config: RunConfig) -> float:
    """On the rank that has most: matrices in the run's format, all else in bf16 or wider.

    Left out: scales, and copies of key and value heads where there are fewer of them than ranks.
    """
    stages = stage_layers(config.model.layers, config.parallel.pp, None)
    last = len(stages) - 1
    return max(_stage_bytes(config, layers, index == 0, index == last) for index, layers in enumerate(stages))


def _stage_bytes(config: RunConfig, layers: range, first: bool, last: bool) -> float:
    """Weights of one pipeline stage on one rank."""
    model = config.model
    narrow = bytes_of(config.precision.dtype)
    wide = max(narrow, BYTES["bf16"])
    ends = Part(layers=layers, first=first, last=last, recomputed=0, offloaded=0)
    # The embedding is whole on every rank, as each looks up its own tokens; the head is cut like a dense layer.
    embedding, head = model.vocab * model.hidden, model.vocab * model.hidden / _sharing(config)
    matrices = embedding * first + head * (last and not (first and model.tied_embeddings))
    total = wide * (matrices + sum(w.size for w in end_weights(model, ends) if len(w.shape) == 1))
    for layer in layers:
        for weight in layer_weights(model, layer):
            total += _on_rank(config, weight) * (narrow if _is_product(model, weight) else wide)
    return total


def _is_product(model: Model, weight: Weight) -> bool:
    """Whether it is multiplied in the run's format: routers, norms and convolutions are not."""
    return len(weight.shape) > 1 and not weight.whole


def _on_rank(config: RunConfig, weight: Weight) -> float:
    """Numbers of a weight that one rank holds."""
    split = config.parallel
    if weight.routed:  # whole experts over ep, each one's width over the rest
        return weight.size / split.tp
    return weight.size if weight.cut is None else weight.size / _sharing(config)


def _sharing(config: RunConfig) -> int:
    """Ranks that share each request, and all weights but the routed experts."""
    return 1 if _work(config).attention_dp else config.parallel.tp


def token_bytes(config: RunConfig) -> float:
    """Cache of one token on the stage with most. A rank has at least one head; a latent is whole on each."""
    model, ranks = config.model, _sharing(config)
    parts = 1 if model.latent else min(ranks, model.kv_heads)
    return kv_bytes_per_token(model, config.precision.kv_dtype) * _stage_share(config, "kv_values") / parts


def state_bytes(config: RunConfig) -> float:
    """What recurrent blocks keep for a request of any length, in fp32, on the stage with most."""
    total = state_bytes_per_sequence(config.model)
    return total * _stage_share(config, "state_values") / _sharing(config)


def _stage_share(config: RunConfig, values: str) -> float:
    """Of what all layers keep, the part of the pipeline stage that keeps most."""
    model = config.model
    stages = stage_layers(model.layers, config.parallel.pp, None)
    if len(stages) == 1:
        return 1.0
    kept = [
        sum(getattr(BLOCKS[kind](model), values) for layer in layers for kind in layer_blocks(model, layer))
        for layers in stages
    ]
    return max(kept) / sum(kept) if sum(kept) else 0.0


def workspace_bytes(config: RunConfig) -> float:
    """A step's activations at max_num_tokens, and the logits of all that sample."""
    return _work(config).max_num_tokens * _step_bytes_per_token(config) + _logit_bytes(config)


def _step_bytes_per_token(config: RunConfig) -> float:
    """The stream and the widest block's values.

    With attention data parallelism every rank also has the other ranks' tokens before its experts and the sums behind.
    """
    model = config.model
    widest = max(block.saved_values for _, _, block in stack(model)) / _sharing(config)
    travelling = 2 * model.hidden * (config.parallel.tp - 1) if _work(config).attention_dp and model.experts else 0
    return (2 * model.hidden + widest + travelling) * BYTES["bf16"]


def _logit_bytes(config: RunConfig) -> float:
    return _work(config).max_batch_size * config.model.vocab * BYTES["fp32"]


def free_bytes(config: RunConfig) -> float | None:
    """What the weights leave of the GPU's memory, before the run; null when that is unknown."""
    memory = gpu(config.machine.gpu).memory_bytes
    return None if memory is None else max(0.0, memory - weight_bytes(config))


def room(config: RunConfig, free_bytes: float) -> Room:
    """What fits into the memory that is left at the run's KV fraction."""
    work = _work(config)
    token, state, workspace = token_bytes(config), state_bytes(config), workspace_bytes(config)
    request = _whole_tokens(work) * token + state
    cache = work.kv_fraction * max(0.0, free_bytes - workspace)
    states = (work.max_batch_size + 1) * state  # one more is for padding
    return Room(
        free=free_bytes,
        workspace=workspace,
        cache=cache,
        token=token,
        request=request,
        tokens=max(0, int((cache - states) // token)) if token else 0,
        requests=int(cache // request),
    )


def wanted_bytes(config: RunConfig) -> float:
    """Cache of as many whole requests as one rank may compute at once."""
    work = _work(config)
    schedulers = config.parallel.tp if work.attention_dp else 1
    requests = min(-(-work.concurrency // schedulers), work.max_batch_size)
    return requests * ((work.isl + work.osl) * token_bytes(config) + state_bytes(config))


def check_fits(config: RunConfig) -> None:
    """A ConfigError with the numbers where not even one request would fit on the GPU; other runs are left to try."""
    if config.workload.kind != "inference":
        return
    free = free_bytes(config)
    if free is None:
        return
    if free == 0:
        raise ConfigError(
            f"the weights of {config.model.name} in {config.precision.dtype} need {_gib(weight_bytes(config))} a GPU, "
            f"which is more than a {config.machine.gpu} has; take more GPUs (TP, PP, EP) or a smaller dtype"
        )
    here = room(config, free)
    if here.requests == 0 or _states_crowd_out(config, here):
        raise ConfigError(advice(config, free))


def _states_crowd_out(config: RunConfig, here: Room) -> bool:
    """Whether the states of a full batch leave no room for one request's tokens."""
    return here.token > 0 and here.tokens < _whole_tokens(_work(config))


def advice(config: RunConfig, free_bytes: float) -> str:
    """What to change so that the run fits, or that it does; one line with the numbers."""
    work, here = _work(config), room(config, free_bytes)
    lengths = f"{work.isl}+{work.osl} tokens"
    if here.requests == 0:
        return (
            f"one request of {lengths} needs {_gib(here.request)} of cache, KV_CACHE_FRACTION={work.kv_fraction:g} of "
            f"the {_gib(max(0.0, here.free - here.workspace))} beside a step of {work.max_num_tokens} tokens is "
            f"{_gib(here.cache)}; {_for_one_request(config, here)}"
        )
    if _states_crowd_out(config, here):
        states = _gib((work.max_batch_size + 1) * state_bytes(config))
        way_out = f"MAX_BATCH_SIZE={here.requests - 1} would do" if here.requests > 1 else "take more GPUs"
        return f"the states of a batch of {work.max_batch_size} need {states} of {_gib(here.cache)} of cache; {way_out}"
    if here.requests < min(work.max_batch_size, work.concurrency):
        return (
            f"the cache holds {here.requests} whole requests of {lengths}, so that of a batch of "
            f"{work.max_batch_size} some wait; MAX_BATCH_SIZE={here.requests} or more GPUs would do"
        )
    return f"fits: room for {here.requests} whole requests of {lengths} ({here.tokens:,} tokens)"


def _for_one_request(config: RunConfig, here: Room) -> str:
    """A larger fraction, a smaller step or batch, or shorter requests: the first that would do."""
    spare = here.free - here.workspace
    least = math.ceil(here.request / spare / FINEST) * FINEST if spare > 0 else math.inf
    if least <= MOST:
        return f"KV_CACHE_FRACTION={least:.2f} would do"
    for fraction in (_work(config).kv_fraction, MOST):
        if smaller := _smaller_step(config, here.free - here.request / fraction):
            raised = "" if fraction == _work(config).kv_fraction else f"KV_CACHE_FRACTION={fraction:.2f} with "
            return f"{raised}{smaller} would do"
    block = here.token * _work(config).block_tokens
    tokens = int(MOST * spare // block) * _work(config).block_tokens if block else 0
    shorter = f"requests of at most {tokens} tokens at KV_CACHE_FRACTION={MOST}, " if tokens > 0 else ""
    return f"take {shorter}more GPUs or a smaller dtype"


def _smaller_step(config: RunConfig, left: float) -> str | None:
    """A token budget or a batch with which a step takes no more than so many bytes."""
    work = _work(config)
    fewest = work.max_batch_size if work.chunked_prefill else max(work.max_batch_size, work.isl)
    tokens = int((left - _logit_bytes(config)) // _step_bytes_per_token(config))
    if fewest <= tokens < work.max_num_tokens:
        return f"MAX_NUM_TOKENS={tokens}"
    row = _logit_bytes(config) / work.max_batch_size
    batch = int((left - work.max_num_tokens * _step_bytes_per_token(config)) // row)
    return f"MAX_BATCH_SIZE={batch}" if 1 <= batch < work.max_batch_size else None


def _whole_tokens(work: Inference) -> int:
    """Places in the paged cache that a whole request takes: blocks are not shared."""
    return -(-(work.isl + work.osl) // work.block_tokens) * work.block_tokens


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def _gib(number: float) -> str:
    return f"{number / GIB:.3g} GiB"
