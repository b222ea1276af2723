"""From a configuration to an engine that is ready: weights, layers, the cache that fits, graphs, the scheduler.

    engine = open_engine(config, place, longest=2000)

How large the cache may be is measured: the largest step the engine will ever compute is computed once without one, and
of the memory that then is left the cache gets the fraction asked for. It is never larger than what a full batch of the
longest sequences could fill, unless prompts that begin alike may use more. Ranks that schedule the same requests each
for itself have caches of one size, that of the rank with least room: else they would decide differently.
"""

from pathlib import Path

import torch

from llmb.config.spec import Inference, RunConfig
from llmb.runtime.rank_info import Place
from llmb.serve.block_pool import BlockPool
from llmb.serve.decode_graphs import graph_sizes
from llmb.serve.engine import Engine
from llmb.serve.group_collectives import SpreadExperts, least_of_all
from llmb.serve.layers.served_model import Stack, build_stack
from llmb.serve.model_runner import TorchRunner
from llmb.serve.pipeline_runner import StageRunner
from llmb.serve.rank_groups import Ranks
from llmb.serve.scheduler import Scheduler
from llmb.serve.serve_layout import join_groups
from llmb.serve.serve_support import check_layout
from llmb.serve.served_dtypes import how_of
from llmb.serve.step_batch import Inputs
from llmb.serve.step_limits import Limits
from llmb.serve.weights.hf_folder import FolderWeights
from llmb.serve.weights.weight_source import RandomWeights, Weights

HOST_SHARE = 0.5  # of a machine's free memory that may count as the device's, where there is no device but the host


def open_engine(config: RunConfig, place: Place, longest: int) -> Engine:
    """The engine on this rank, for sequences of at most `longest` tokens."""
    work = config.workload
    assert isinstance(work, Inference)
    check_layout(config)
    ranks = join_groups(config, place)
    if place.rank == 0 and work.cuda_graphs and place.device.type == "cuda" and not has_graphs(ranks, work):
        print("CUDA graphs are off: they are for one rank, what travels between several is not captured", flush=True)
    stack = build_stack(config.model, weights_of(config, place.device), how_of(config), ranks)
    return engine_on(stack, work, longest, least_of_all(cache_blocks(stack, work, longest), ranks.device))


def engine_on(stack: Stack, work: Inference, longest: int, blocks: int) -> Engine:
    """An engine whose cache has so many blocks.

    A pipeline computes as many steps at once as it has stages, each of other sequences: the host has to know a token
    before the first stage can go on with it.
    """
    slots, device, stages = work.max_batch_size, stack.ranks.device, stack.ranks.stage.size
    for mixer in stack.mixers():
        mixer.allocate(blocks, work.block_tokens, slots + 1, device)
    sizes = graph_sizes(slots) if has_graphs(stack.ranks, work) else ()
    run = TorchRunner if stages == 1 else StageRunner
    runner = run(stack, slots, longest, work.block_tokens, work.max_num_tokens, sizes)
    limits = Limits(
        max_batch_size=slots,
        max_num_tokens=work.max_num_tokens,
        max_length=longest,
        chunked_prefill=work.chunked_prefill,
    )
    pool = BlockPool(blocks, work.block_tokens, shares_prefixes(stack, work))
    scheduler = Scheduler(pool, limits, chain=stages == 1, depth=stages)
    experts = stack.ranks.experts
    lockstep = experts.any_busy if isinstance(experts, SpreadExperts) else None
    return Engine(scheduler, runner, depth=max(1, stages - 1), lockstep=lockstep)


def has_graphs(ranks: Ranks, work: Inference) -> bool:
    """Whether decodes are replays of CUDA graphs: on one rank only, as exchanges between ranks are not captured."""
    return work.cuda_graphs and ranks.device.type == "cuda" and ranks.world == 1


def shares_prefixes(stack: Stack, work: Inference) -> bool:
    """Whether prompts that begin alike share blocks: not where a sequence has a state, whose past is not kept.

    It may be in another stage's layers.
    """
    return work.prefix_cache and not stack.model.blocks.get("mamba")


def weights_of(config: RunConfig, device: torch.device) -> Weights:
    """From the folder that the run names, or random."""
    work, dtype = config.workload, how_of(config).dtype
    assert isinstance(work, Inference)
    if work.weights is not None:
        return FolderWeights(config.model, Path(work.weights), dtype, device)
    return RandomWeights(config.model, work.seed, dtype, device)


def cache_blocks(stack: Stack, work: Inference, longest: int) -> int:
    """How many blocks the cache gets; at least one."""
    per_sequence = -(-longest // work.block_tokens)
    bytes_per_block = work.block_tokens * sum(mixer.bytes_per_token for mixer in stack.mixers())
    states = (work.max_batch_size + 1) * sum(mixer.bytes_per_slot for mixer in stack.mixers())
    wanted = work.max_batch_size * per_sequence
    room = int(free_bytes(stack, work) * work.kv_fraction) - states
    fitting = room // bytes_per_block if bytes_per_block else wanted
    return max(1, fitting if shares_prefixes(stack, work) else min(wanted, fitting))


def free_bytes(stack: Stack, work: Inference) -> int:
    """What is left for the cache beside the weights and the largest step."""
    device = stack.ranks.device
    if device.type != "cuda":
        return int(_host_free_bytes() * HOST_SHARE / stack.ranks.world)
    _largest_step(stack, work)
    peak = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - peak)


@torch.inference_mode()
def _largest_step(stack: Stack, work: Inference) -> None:
    """As many tokens as a step may have, of one prompt, and as many rows of logits as a batch; nothing is kept."""
    device, tokens = stack.ranks.device, work.max_num_tokens
    for mixer in stack.mixers():
        mixer.allocate(1, work.block_tokens, 1, device)
    inputs = Inputs(
        positions_N=torch.arange(tokens, device=device),
        places_N=torch.full((tokens,), -1, device=device),
        slots_P=torch.zeros(1, dtype=torch.int64, device=device),
        starts_P1=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        lengths_P=torch.tensor([tokens], dtype=torch.int32, device=device),
        table_PM=torch.zeros(1, 1, dtype=torch.int32, device=device),
        decodes=0,
        longest_part=tokens,
        longest=tokens,
        parts=((0, tokens),),
    )
    stack.ranks.experts.begin(tokens)
    torch.cuda.reset_peak_memory_stats(device)
    x_NC = torch.zeros(tokens, stack.model.hidden, dtype=stack.dtype, device=device)
    if stack.ranks.stage.first:
        x_NC = stack.embed(torch.zeros(tokens, dtype=torch.int64, device=device))
    x_NC = stack.through(x_NC, inputs)
    if stack.ranks.stage.last:
        stack.logits(x_NC, torch.zeros(work.max_batch_size, dtype=torch.int64, device=device)).argmax(dim=-1)
    torch.cuda.synchronize(device)


def _host_free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        found = next(line for line in lines if line.startswith("MemAvailable"))
    return int(found.split()[1]) * 1024
