"""How much memory serving needs on a rank, and what would fit: weights, a step's workspace, the cache of requests.

    room(config, free_bytes)      how many tokens and whole requests the cache holds at the run's KV fraction
    advice(config, free_bytes)    which KV_CACHE_FRACTION, MAX_BATCH_SIZE or MAX_NUM_TOKENS would fit, in one line

`free_bytes` is what a rank has left once its weights are there: measured by the engine, or estimated before the run.
The cache takes kv_fraction of it; a step's activations must fit into the rest. All are the fullest rank's.
"""

import math
from dataclasses import dataclass, replace

from llmb.costs import BLOCKS, BYTES, bytes_of, kv_bytes_per_token, stack
from llmb.errors import ConfigError
from llmb.hardware import GIB, gpu
from llmb.layout import stage_layers
from llmb.share import Part, Weight, end_weights, layer_blocks, layer_weights
from llmb.spec import Inference, Model, RunConfig

FINEST = 0.01  # steps in which a KV fraction is proposed


@dataclass(frozen=True, kw_only=True)
class Room:
    """What becomes of the memory that the weights leave."""

    free: float  # bytes
    cache: float  # of them, for cached tokens and states
    workspace: float  # a step's activations need these; estimated
    token: float  # bytes of one cached token
    request: float  # bytes of one whole request, its state included
    tokens: int  # that the cache holds beside the states of a full batch
    requests: int  # whole ones it holds, with their states

    @property
    def lacking(self) -> float:
        """Bytes that the workspace needs beyond what the cache leaves."""
        return max(0.0, self.workspace - (self.free - self.cache))


def weight_bytes(config: RunConfig) -> float:
    """On the rank that has most: matrices in the run's format, all else in bf16 or wider.

    Left out: scales, and copies of key and value heads where there are fewer of them than ranks.
    """
    stages = stage_layers(config.model.layers, config.parallel.pp, None)
    return max(_stage_bytes(config, layers, index == 0, index == len(stages) - 1) for index, layers in enumerate(stages))


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
    total = sum(count * block.state_values for _, count, block in stack(config.model)) * BYTES["fp32"]
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
    token, state = token_bytes(config), state_bytes(config)
    request = _blocks(work) * work.block_tokens * token + state
    cache = work.kv_fraction * free_bytes
    return Room(
        free=free_bytes,
        cache=cache,
        workspace=workspace_bytes(config),
        token=token,
        request=request,
        tokens=max(0, int((cache - work.max_batch_size * state) // token)) if token else 0,
        requests=int(cache // request),
    )


def wanted_bytes(config: RunConfig) -> float:
    """Cache of as many whole requests as one rank may compute at once."""
    work = _work(config)
    schedulers = config.parallel.tp if work.attention_dp else 1
    requests = min(-(-work.concurrency // schedulers), work.max_batch_size)
    return requests * ((work.isl + work.osl) * token_bytes(config) + state_bytes(config))


def check_fits(config: RunConfig) -> None:
    """A ConfigError with the numbers where not even one request would fit on the GPU."""
    free = free_bytes(config)
    if free is None:
        return
    if free == 0:
        raise ConfigError(
            f"the weights of {config.model.name} in {config.precision.dtype} need {_gib(weight_bytes(config))} a GPU, "
            f"which is more than a {config.machine.gpu} has; take more GPUs (TP, PP, EP) or a smaller dtype"
        )
    if room(config, free).requests == 0:
        raise ConfigError(advice(config, free))


def advice(config: RunConfig, free_bytes: float) -> str:
    """What to change so that the run fits, or that it does; one line with the numbers."""
    work, here = _work(config), room(config, free_bytes)
    if here.requests == 0:
        return f"{_too_small(config, here)}; {_for_one_request(config, here)}"
    if here.lacking:
        return (
            f"a step of {work.max_num_tokens} tokens needs about {_gib(here.workspace)}, KV_CACHE_FRACTION="
            f"{work.kv_fraction:g} leaves {_gib(here.free - here.cache)} of {_gib(here.free)}; {_for_a_step(config, here)}"
        )
    if here.requests < min(work.max_batch_size, work.concurrency):
        return (
            f"the cache holds {here.requests} whole requests of {work.isl}+{work.osl} tokens, so that a batch of "
            f"{work.max_batch_size} is computed again in part; MAX_BATCH_SIZE={here.requests} never is"
        )
    return f"fits: room for {here.requests} whole requests of {work.isl}+{work.osl} tokens ({here.tokens:,} tokens)"


def _too_small(config: RunConfig, here: Room) -> str:
    work = _work(config)
    return (
        f"one request of {work.isl}+{work.osl} tokens needs {_gib(here.request)} of cache, KV_CACHE_FRACTION="
        f"{work.kv_fraction:g} of {_gib(here.free)} free is {_gib(here.cache)}"
    )


def _for_one_request(config: RunConfig, here: Room) -> str:
    """A larger fraction, a smaller step beside it, or shorter requests."""
    least = math.ceil(here.request / here.free / FINEST) * FINEST if here.free else math.inf
    if least <= _highest(here):
        return f"KV_CACHE_FRACTION={least:.2f} would do"
    tokens = _step_that_fits(config, here.free - least * here.free) if least < 1 else 0
    if tokens:
        return f"KV_CACHE_FRACTION={least:.2f} with MAX_NUM_TOKENS={tokens} would do"
    most = int(_highest(here) * here.free // here.token) if here.token else 0
    shorter = f"requests of at most {most} tokens, " if most > 0 else ""
    return f"no fraction would do: take {shorter}more GPUs or a smaller dtype"


def _for_a_step(config: RunConfig, here: Room) -> str:
    """A smaller fraction that still holds a request, or a smaller step at the same fraction."""
    work, ways = _work(config), []
    highest = _highest(here)
    if highest * here.free >= here.request:
        ways.append(f"KV_CACHE_FRACTION={highest:.2f}")
    if tokens := _step_that_fits(config, here.free - here.cache):
        ways.append(f"MAX_NUM_TOKENS={tokens}")
    half = replace(config, workload=replace(work, max_batch_size=max(1, work.max_batch_size // 2)))
    if workspace_bytes(half) <= here.free - here.cache:
        ways.append(f"MAX_BATCH_SIZE={max(1, work.max_batch_size // 2)}")
    return " or ".join(ways) + " would do" if ways else "take more GPUs or a smaller dtype"


def _highest(here: Room) -> float:
    """The largest fraction that leaves room for a step."""
    return max(0.0, math.floor((here.free - here.workspace) / here.free / FINEST) * FINEST) if here.free else 0.0


def _step_that_fits(config: RunConfig, left: float) -> int:
    """The most tokens a step may have in so many bytes; 0 where that is fewer than the settings allow."""
    work = _work(config)
    fewest = work.max_batch_size if work.chunked_prefill else max(work.max_batch_size, work.isl)
    tokens = int((left - _logit_bytes(config)) // _step_bytes_per_token(config))
    return tokens if fewest <= tokens < work.max_num_tokens else 0


def _blocks(work: Inference) -> int:
    """Blocks of the paged cache that a whole request takes."""
    return -(-(work.isl + work.osl) // work.block_tokens)


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def _gib(number: float) -> str:
    return f"{number / GIB:.3g} GiB"
