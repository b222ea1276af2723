"""Peak memory of a rank of the native training engine, in closed form.

    peak_memory(config)      bytes of weights, gradients, optimizer and activations at the memory peak

The passes of a step are combined in schedule order, as by the dry run (`llmb/train/dry_run/meta_rank.py`): each adds
to the memory before it at most its peak (`pass_memory.py`), and leaves its change. Weights and optimizer state are
always there: of the matrices a rank's shard with its low bits and moments, without fsdp all that it computes with, and
in fp8 what is quantized once per step.
"""

from collections import Counter
from functools import cache
from operator import add

from llmb.config.spec import RunConfig, Training
from llmb.perfmodel.activation_memory import ActivationSizes
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.pass_memory import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    BytesByPurpose,
    StagePasses,
    UnitValues,
    offloaded_layers,
)
from llmb.perfmodel.pipeline_schedule import MAX_PENDING_SENDS, rank_order
from llmb.perfmodel.shards import StageShape, rank_stages

Sizes = tuple[float, ...]  # bytes by purpose, in this order: a step adds thousands of them
PURPOSES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS)
LOW_BITS_BYTES = 2  # of a master weight in fp32, whose other half GEMMs read
SIMULATED_ROUNDS = 4  # of pp micro-batches each: warm-up, two steady rounds and cool-down contain every peak of a step


def peak_memory(config: RunConfig) -> dict[str, float]:
    """Return the peak memory of a rank: of the first or last stage, whichever needs more, or of the one that runs."""
    ends = (0, config.parallel.pp - 1) if config.pipeline_rank is None else (config.pipeline_rank,)
    peaks = [_peak_of_rank(config, rank) for rank in dict.fromkeys(ends)]
    return max(peaks, key=lambda memory: sum(memory.values()))


def offloaded(config: RunConfig) -> float:
    """Return the host memory for offloaded activations of a first-stage rank, of all micro-batches in flight."""
    sizes, stages, parallel = ActivationSizes(config), rank_stages(config), config.parallel
    layers = sum(sizes.layer(layer) for stage in stages for layer in offloaded_layers(stage))
    return layers * min(sizes.work.ga, parallel.pp)


def _peak_of_rank(config: RunConfig, rank: int) -> dict[str, float]:
    work, parallel, stages = config.workload, config.parallel, rank_stages(config, rank)
    assert isinstance(work, Training)
    passes = [StagePasses(config, stage) for stage in stages]
    micro_batches = _simulated_micro_batches(work.ga, parallel.pp)

    @cache
    def pass_memory(index: int, first: bool, last: bool, forward: bool) -> tuple[Sizes, Sizes]:
        """Return the peak of a pass and its change."""
        memory = passes[index].forward(first) if forward else passes[index].backward(first, last)
        return _sizes(memory.peak), _sizes(memory.change)

    state = _state(config, stages)
    overlap_send = parallel.pp > 1 and parallel.overlap_send
    state[ACTIVATIONS] += MAX_PENDING_SENDS * ActivationSizes(config).residual * overlap_send  # type: ignore[assignment]
    held = peak = _sizes(state)
    for index, micro, forward in rank_order(parallel.pp, parallel.vp, micro_batches, rank):
        added, change = pass_memory(index, micro == 0, micro == micro_batches - 1, forward)
        highest = tuple(map(add, held, added))
        if sum(highest) > sum(peak):
            peak = highest
        held = tuple(map(add, held, change))
    return dict(zip(PURPOSES, peak, strict=True))


def _state(config: RunConfig, stages: list[StageShape]) -> BytesByPurpose:
    """Weights and optimizer state, which are always there."""
    work, sizes = config.workload, ActivationSizes(config)
    assert isinstance(work, Training)
    units = [unit for stage in stages for unit in UnitValues.of_stage(config.model, stage, config.parallel)]
    shards, replicated = sum(unit.shards for unit in units), BYTES["fp32"] * sum(unit.replicated for unit in units)
    weights = sizes.value_bytes * sum(unit.shards if config.parallel.fsdp else unit.full for unit in units)
    low = LOW_BITS_BYTES * shards * (sizes.value_bytes < BYTES[work.master_weights])
    cached = sum(sizes.fp8_cache(layer) for stage in stages for layer in stage.layers)
    moments = 2 * (BYTES[work.moments] * shards + replicated)
    return Counter({WEIGHTS: weights + low + replicated + cached, OPTIMIZER: moments})


def _simulated_micro_batches(ga: int, pp: int) -> int:
    """Return how many of a step's micro-batches to simulate: the steady rounds of a long step are all alike."""
    simulated = SIMULATED_ROUNDS * pp + ga % pp
    return min(ga, simulated)


def _sizes(memory: BytesByPurpose) -> Sizes:
    return tuple(memory[purpose] for purpose in PURPOSES)
