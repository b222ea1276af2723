"""Builds the engine of a configuration: weights, layers, KV cache, CUDA graphs and scheduler.

    engine = build_engine(config, rank_info, max_seq_len=2000)

The KV cache is sized by profiling: the largest step of the engine is computed once without a cache, and the cache gets
the configured fraction of the memory that is left. It is never larger than a full batch of the longest sequences needs,
unless a prefix cache may use more. Layers with a sliding window have blocks of their own, which are freed behind the
window, unless a prefix cache shares them (`perfmodel/serving_time/cache_blocks.py`). Ranks that schedule the same
requests each for itself have caches of one size, that of the rank with the least memory: otherwise they would decide
differently. A draft model for speculative decoding has a cache of its own in the same blocks.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from llmb.config.native.number_formats import published_fp8_recipe
from llmb.config.native.serving_support import check_serving_layout
from llmb.config.native.speculation import draft_config, drafts_by_first_layers
from llmb.config.spec import Inference, RunConfig
from llmb.ops.device_capabilities import check_dtypes, check_fp8_attention
from llmb.perfmodel.serving_time.cache_blocks import CacheBlocks, split_blocks, window_blocks
from llmb.runtime.rank_info import RankInfo
from llmb.serve.admission import SchedulerLimits
from llmb.serve.engine import Engine
from llmb.serve.group_collectives import DataParallelExperts, min_over_ranks
from llmb.serve.input_staging import max_rows
from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.kv_cache.window_blocks import WindowBlocks
from llmb.serve.layers.mixer import Mixer
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import ServedModel, ServingDtypes, build_served_model
from llmb.serve.model_runner import TorchModelRunner
from llmb.serve.pipeline_runner import PipelineStageRunner
from llmb.serve.rank_groups import RankGroups
from llmb.serve.scheduler import Scheduler
from llmb.serve.serve_layout import join_groups
from llmb.serve.speculative.acceptance import Acceptance, ForcedAcceptance, GreedyAcceptance
from llmb.serve.speculative.speculative_runner import SpeculativeRunner
from llmb.serve.step_batch import ModelRunner, StepInputs
from llmb.serve.step_graphs import GraphSize, decode_sizes, mixed_sizes
from llmb.serve.weights.hf_folder import HfFolderWeights
from llmb.serve.weights.weight_source import RandomWeights, WeightSource

HOST_MEMORY_FRACTION = 0.5  # of the host's free memory that counts as device memory when serving on a CPU
FP8_FORMATS: dict[str, Format] = {
    "tensorwise": "fp8_tensor",
    "channelwise": "fp8_channel",
    "blockwise": "fp8_block",
}


def build_engine(config: RunConfig, rank_info: RankInfo, max_seq_len: int, shorten_to_cache: bool = False) -> Engine:
    """Build the engine of this rank, for sequences of at most `max_seq_len` tokens.

    `shorten_to_cache`: if the KV cache holds fewer, that is the maximum; otherwise such sequences are refused later.
    """
    work = config.workload
    assert isinstance(work, Inference)
    check_serving_layout(config)
    check_dtypes(rank_info.device, dtype=config.precision.dtype, kv_dtype=config.precision.kv_dtype)
    if config.precision.attention_dtype == "fp8":
        check_fp8_attention(rank_info.device)
    groups = join_groups(config, rank_info)
    device = rank_info.device
    if rank_info.rank == 0 and work.cuda_graphs and device.type == "cuda" and not uses_cuda_graphs(groups, work):
        print("CUDA graphs are off: they need a single rank, as collectives are not captured", flush=True)
    source = weight_source(config, device)
    model = build_served_model(config.model, source, serving_dtypes(config), groups, max_seq_len)
    if rank_info.rank == 0 and config.model.window_layers and uses_prefix_cache(model, work):
        print("prefix_cache: layers with a sliding window keep whole sequences, to share their blocks", flush=True)
    draft = build_draft(config, max_seq_len, device, groups)
    blocks = num_cache_blocks(model, work, max_seq_len, draft)
    blocks = CacheBlocks(*(min_over_ranks(count, device) for count in (blocks.full, blocks.window)))
    if shorten_to_cache:
        max_seq_len = min(max_seq_len, blocks.full * work.block_tokens)
    return engine_for_model(model, work, max_seq_len, blocks, draft)


def build_draft(config: RunConfig, max_seq_len: int, device: torch.device, groups: RankGroups) -> ServedModel | None:
    """Build the draft model of speculative decoding; None: the run has none."""
    drafting = draft_config(config)
    if drafting is None:
        return None
    source = weight_source(config if drafts_by_first_layers(config) else drafting, device)
    return build_served_model(drafting.model, source, serving_dtypes(drafting), groups, max_seq_len)


def engine_for_model(
    model: ServedModel, work: Inference, max_seq_len: int, blocks: CacheBlocks, draft: ServedModel | None = None
) -> Engine:
    """Build an engine whose KV cache has so many blocks.

    A pipeline computes as many steps at once as it has stages, each of other sequences: a token has to be read by the
    host before the first stage can continue with it.
    """
    slots, device, stages = work.max_batch_size, model.groups.device, model.groups.stage.size
    num_drafts = 0 if draft is None else work.speculative_tokens
    for mixer in all_mixers(model, draft):
        group = blocks.window if mixer.window and blocks.window else blocks.full
        mixer.allocate(group, work.block_tokens, slots + 1, device)
    has_graphs = uses_cuda_graphs(model.groups, work)
    sizes = graph_sizes(model, work, max_rows(slots, num_drafts)) if has_graphs else ()
    runner_class = TorchModelRunner if stages == 1 else PipelineStageRunner
    num_tables = 2 if blocks.window else 1
    lengths = (slots, max_seq_len, work.block_tokens, work.max_num_tokens)
    runner: ModelRunner
    runner = target = runner_class(model, *lengths, sizes, num_tables, num_drafts)
    if draft is not None:
        draft_sizes = graph_sizes(draft, work, max_rows(slots, 1)) if has_graphs else ()
        runner = SpeculativeRunner(
            target, TorchModelRunner(draft, *lengths, draft_sizes, target=target), acceptance_of(work)
        )
    limits = SchedulerLimits(
        max_batch_size=slots,
        max_num_tokens=work.max_num_tokens,
        max_seq_len=max_seq_len,
        chunked_prefill=work.chunked_prefill,
    )
    pool = BlockPool(blocks.full, work.block_tokens, uses_prefix_cache(model, work))
    windows = None
    if blocks.window:
        assert model.spec.window is not None
        windows = WindowBlocks(blocks.window, work.block_tokens, model.spec.window)
    scheduler = Scheduler(pool, limits, stages == 1 and draft is None, stages, windows, num_drafts)
    experts = model.groups.experts
    lockstep = experts.any_busy if isinstance(experts, DataParallelExperts) else None
    depth = max(1, stages - 1) if draft is None else 0  # which drafts stand decides what the next step computes
    return Engine(scheduler, runner, depth=depth, lockstep=lockstep)


def acceptance_of(work: Inference) -> Acceptance:
    """Return how drafts are accepted: by greedy equality, or by stated probabilities."""
    if work.draft_acceptance is None:
        return GreedyAcceptance()
    return ForcedAcceptance(work.draft_acceptance, work.seed)


def all_mixers(model: ServedModel, draft: ServedModel | None) -> Iterator[Mixer]:
    """Yield the sublayers that share blocks: those of the model, and those of its draft model."""
    yield from model.mixers()
    if draft is not None:
        yield from draft.mixers()


def graph_sizes(model: ServedModel, work: Inference, rows: int) -> tuple[GraphSize, ...]:
    """Return the sizes of steps to capture, with up to so many decodes.

    Prefill chunks only if every layer computes them without host sizes.
    """
    captures_prefill = all(mixer.captures_prefill for mixer in model.mixers())
    return decode_sizes(rows) + (mixed_sizes(rows, work.max_num_tokens) if captures_prefill else ())


def uses_cuda_graphs(groups: RankGroups, work: Inference) -> bool:
    """Return whether steps replay CUDA graphs: on a single rank only, as collectives are not captured."""
    return work.cuda_graphs and groups.device.type == "cuda" and groups.world_size == 1


def uses_prefix_cache(model: ServedModel, work: Inference) -> bool:
    """Return whether prompts share prefix blocks: not if any stage has Mamba state, which is not cached."""
    return work.prefix_cache and not model.spec.blocks.get("mamba")


def weight_source(config: RunConfig, device: torch.device) -> WeightSource:
    """Return the weights of the configured folder, or random ones."""
    work, dtype = config.workload, serving_dtypes(config).dtype
    assert isinstance(work, Inference)
    if work.weights is not None:
        return HfFolderWeights(config.model, Path(work.weights), dtype, device)
    return RandomWeights(config.model, work.seed, dtype, device)


def serving_dtypes(config: RunConfig) -> ServingDtypes:
    """Return the dtypes of a run; fp8 weights are scaled as the model is published unless the run says otherwise."""
    precision = config.precision
    dtype = torch.float32 if precision.dtype == "fp32" else torch.bfloat16
    formats: dict[str, Format] = {
        "fp8": FP8_FORMATS[precision.fp8_recipe or published_fp8_recipe(config.model)],
        "nvfp4": "nvfp4",
        "mxfp4": "mxfp4",
    }
    kv_dtype = torch.float8_e4m3fn if precision.kv_dtype == "fp8" else dtype
    return ServingDtypes(
        dtype, formats.get(precision.dtype, "plain"), kv_dtype, fp8_prefills=precision.attention_dtype == "fp8"
    )


def num_cache_blocks(
    model: ServedModel, work: Inference, max_seq_len: int, draft: ServedModel | None = None
) -> CacheBlocks:
    """Return how many blocks the KV cache gets; at least one in each group of layers."""
    full_batch = work.max_batch_size * -(-max_seq_len // work.block_tokens)
    state_bytes = (work.max_batch_size + 1) * sum(mixer.bytes_per_slot for mixer in model.mixers())
    cache_bytes = max(0, int(available_bytes(model, work) * work.kv_fraction) - state_bytes)
    windows = full_batch_windows(model, work, max_seq_len)
    blocks = split_blocks(cache_bytes, *block_bytes(model, work, draft), windows, full_batch)
    full = max(1, blocks.full if uses_prefix_cache(model, work) else min(full_batch, blocks.full))
    return CacheBlocks(full, max(1, blocks.window) if windows else 0)


def full_batch_windows(model: ServedModel, work: Inference, max_seq_len: int) -> int:
    """Return the blocks that layers with a sliding window need for a full batch; 0: they keep whole sequences."""
    return window_blocks(
        window=None if uses_prefix_cache(model, work) else model.spec.window,
        block_tokens=work.block_tokens,
        max_seq_len=max_seq_len,
        max_batch_size=work.max_batch_size,
        max_num_tokens=work.max_num_tokens,
    )


def block_bytes(model: ServedModel, work: Inference, draft: ServedModel | None = None) -> tuple[int, int]:
    """Return the bytes of a block in all layers with full attention, and in all with a sliding window."""
    windowed = sum(mixer.bytes_per_token for mixer in all_mixers(model, draft) if mixer.window)
    full = sum(mixer.bytes_per_token for mixer in all_mixers(model, draft)) - windowed
    return work.block_tokens * full, work.block_tokens * windowed


def available_bytes(model: ServedModel, work: Inference) -> int:
    """Return the memory left for the KV cache beside the weights and the largest step."""
    device = model.groups.device
    if device.type != "cuda":
        return int(_free_host_bytes() * HOST_MEMORY_FRACTION / model.groups.world_size)
    _profile_largest_step(model, work)
    peak = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - peak)


@torch.inference_mode()
def _profile_largest_step(model: ServedModel, work: Inference) -> None:
    """Compute one prefill of the maximum token count and the logits of a full batch; nothing is cached."""
    device, tokens = model.groups.device, work.max_num_tokens
    for mixer in model.mixers():
        mixer.allocate(1, work.block_tokens, 1, device)
    inputs = StepInputs(
        positions_N=torch.arange(tokens, device=device),
        slot_mapping_N=torch.full((tokens,), -1, device=device),
        slots_P=torch.zeros(1, dtype=torch.int64, device=device),
        cu_seqlens_P1=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        seq_lens_P=torch.tensor([tokens], dtype=torch.int32, device=device),
        block_table_PM=torch.zeros(1, 1, dtype=torch.int32, device=device),
        num_decodes=0,
        max_query_len=tokens,
        max_seq_len=tokens,
        prefill_chunks=((0, tokens),),
    )
    model.groups.experts.begin_step(tokens)
    torch.cuda.reset_peak_memory_stats(device)
    x_NC = torch.zeros(tokens, model.spec.hidden, dtype=model.dtype, device=device)
    if model.groups.stage.is_first:
        x_NC = model.embed(torch.zeros(tokens, dtype=torch.int64, device=device))
    x_NC = model.forward(x_NC, inputs)
    if model.groups.stage.is_last:
        rows = max_rows(work.max_batch_size, work.speculative_tokens)
        model.logits(x_NC, torch.zeros(rows, dtype=torch.int64, device=device)).argmax(dim=-1)
    torch.cuda.synchronize(device)


def _free_host_bytes() -> int:
    with open("/proc/meminfo") as lines:
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024
