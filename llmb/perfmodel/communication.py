"""Communication of a training step: collectives by kind and group, with their count and bytes.

    step_traffic(config)        closed form, for a rank of the first pipeline stage; a dry run counts the real ones

The closed form leaves out collectives of scalars and counts: norms, losses, tokens per expert.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from llmb.config.spec import Model, RunConfig, Training
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.shards import (
    StageShape,
    Weight,
    end_weights,
    is_sharded,
    layer_blocks,
    layer_weights,
    rank_stages,
    shard_group_size,
)


@dataclass(frozen=True, kw_only=True)
class CollectiveTraffic:
    """All collectives of one kind over one group in a step, as one rank sees them."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send, receive
    dimension: str  # of the device mesh: tp, cp, pp, replicas (dp and cp together), ep, etp, edp, all
    ranks: int
    count: int
    bytes: int  # of the larger side on one rank: output of an all-gather, input of a reduce-scatter


ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-to-all"


class _TrafficCounter:
    """Sums of collectives; groups of one rank are skipped."""

    def __init__(self, config: RunConfig):
        parallel = config.parallel
        edp = shard_group_size(Weight((1,), routed=True), parallel)
        self._ranks = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
        self._ranks |= {"replicas": parallel.dp_cp_size, "edp": edp}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, dimension: str, count: int, bytes_per_call: float) -> None:
        if self._ranks[dimension] > 1:
            self._counts[kind, dimension] += count
            self._bytes[kind, dimension] += round(count * bytes_per_call)

    def __iter__(self) -> Iterator[CollectiveTraffic]:
        for (kind, dimension), count in sorted(self._counts.items()):
            yield CollectiveTraffic(
                kind=kind,
                dimension=dimension,
                ranks=self._ranks[dimension],
                count=count,
                bytes=self._bytes[kind, dimension],
            )


def step_traffic(config: RunConfig, rank: int = 0) -> list[CollectiveTraffic]:
    """Return what a pipeline rank sends and receives in a step."""
    counter = _TrafficCounter(config)
    for stage in rank_stages(config, rank):
        for index, layer in enumerate(stage.layers):
            blocks = layer_blocks(config.model, layer)
            for number, block in enumerate(blocks):
                _add_block(counter, config, block, index < stage.recomputed, is_last=number == len(blocks) - 1)
        _add_ends(counter, config, stage)
        _add_sharding(counter, config, stage)
    return list(counter)


def _sizes(config: RunConfig) -> tuple[Training, float, float]:
    """Return the workload, the tokens of a rank inside a block, and the bytes per value of the residual."""
    work = config.workload
    assert isinstance(work, Training)
    value_bytes = BYTES["fp32" if config.precision.dtype == "fp32" else "bf16"]
    return work, work.mbs * work.seqlen / config.parallel.cp, value_bytes


def _add_block(counter: _TrafficCounter, config: RunConfig, block: str, recomputed: bool, is_last: bool) -> None:
    """Add the collectives of one block: all-gather before and reduce-scatter after it, in backward the reverse.

    A recomputed layer all-gathers again; the reduce-scatter after its last block is not needed.
    """
    work, tokens, value_bytes = _sizes(config)
    model, parallel = config.model, config.parallel
    residual = tokens * model.hidden * value_bytes
    widths = [model.hidden]
    if block == "mla" and model.mla:
        widths = [model.mla.q_rank, model.mla.kv_rank + model.mla.rope_dim]
    if block == "experts":
        _add_experts(counter, config, recomputed)
        if not (model.experts and model.experts.shared):
            return
    for width in widths:
        counter.add(ALL_GATHER, "tp", work.ga * (1 + recomputed), tokens * width * value_bytes)
        counter.add(REDUCE_SCATTER, "tp", work.ga, tokens * width * value_bytes)
    counter.add(REDUCE_SCATTER, "tp", work.ga * (1 + (recomputed and not is_last)), residual)
    counter.add(ALL_GATHER, "tp", work.ga, residual)
    if block in ("attention", "mla"):
        size = work.mbs * work.seqlen * _kv_width(model) / parallel.tp * value_bytes
        counter.add(ALL_GATHER, "cp", work.ga * (1 + recomputed), size)
        counter.add(REDUCE_SCATTER, "cp", work.ga, size)


def _kv_width(model: Model) -> int:
    """Return the width of keys and values of one token over all heads."""
    if model.mla:
        return model.heads * (model.mla.nope_dim + model.mla.rope_dim + model.mla.value_dim)
    return 2 * model.kv_heads * model.head_dim


def _add_experts(counter: _TrafficCounter, config: RunConfig, recomputed: bool) -> None:
    """Add the all-to-alls of routed tokens: dispatch and combine, forward and backward."""
    work, tokens, value_bytes = _sizes(config)
    model, parallel = config.model, config.parallel
    assert model.experts is not None
    routed = tokens / parallel.tp * model.experts.top_k * model.hidden * value_bytes
    calls = work.ga * (4 + 2 * recomputed)
    counter.add(ALL_TO_ALL, "ep", calls, routed)
    counter.add(ALL_TO_ALL, "etp", calls, routed * parallel.etp)


def _add_ends(counter: _TrafficCounter, config: RunConfig, stage: StageShape) -> None:
    """Add the collectives of the residual after the embedding, before the LM head and between pipeline stages."""
    work, tokens, value_bytes = _sizes(config)
    residual = tokens * config.model.hidden * value_bytes
    for present in (stage.first, stage.last):
        counter.add(REDUCE_SCATTER, "tp", work.ga * present, residual)
        counter.add(ALL_GATHER, "tp", work.ga * present, residual)
    neighbours = (not stage.first) + (not stage.last)
    for kind in ("send", "receive"):
        counter.add(kind, "pp", work.ga * neighbours, residual / config.parallel.tp)
        if config.model.tied_embeddings and (stage.first != stage.last):
            (matrix, *_) = end_weights(config.model, stage)
            counter.add(kind, "pp", 1, matrix.optimizer_shard(config.parallel) * BYTES["fp32"])


def _add_sharding(counter: _TrafficCounter, config: RunConfig, stage: StageShape) -> None:
    """Add the all-gathers of weights and reduce-scatters of gradients over data-parallel ranks, layer by layer.

    FSDP gathers weights for each pass; a sharded optimizer (ZeRO-1) once per step.
    """
    work, _, value_bytes = _sizes(config)
    fsdp = config.parallel.fsdp
    groups = [(layer_weights(config.model, layer), 2 if fsdp else 1) for layer in stage.layers]
    groups += [(end_weights(config.model, stage), 1)]
    passes = work.ga if fsdp else 1
    for weights, gathers in groups:
        for dimension in ("replicas", "edp"):
            size = sum(_gathered(weight, config) for weight in weights if _dimension(weight, config) == dimension)
            if size:
                counter.add(ALL_GATHER, dimension, passes * gathers, size * value_bytes)
                counter.add(REDUCE_SCATTER, dimension, passes, size * BYTES["fp32"])


def _dimension(weight: Weight, config: RunConfig) -> str | None:
    """Return the group over which a weight is sharded; None if it is not."""
    parallel = config.parallel
    if not is_sharded(weight, parallel):
        return None
    return "edp" if weight.routed and parallel.ep * parallel.etp > 1 else "replicas"


def _gathered(weight: Weight, config: RunConfig) -> int:
    """Return the number of values of all shards together, padding included."""
    return weight.optimizer_shard(config.parallel) * shard_group_size(weight, config.parallel)
