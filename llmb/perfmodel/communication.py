"""Communication of a training step: collectives by kind and group, with their count and bytes.

    step_traffic(config)        closed form, for a rank of the first pipeline stage; a dry run counts the real ones

The closed form leaves out collectives of scalars and counts: norms, losses, amaxes, tokens per expert.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from llmb.config.model import Model
from llmb.config.spec import RunConfig
from llmb.perfmodel.activation_memory import ActivationSizes
from llmb.perfmodel.expert_capacity import dispatched_rows
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.shards import (
    StageShape,
    end_weights,
    gradient_bytes,
    has_explicit_layers,
    layer_blocks,
    rank_stages,
    stage_units,
    weight_buckets,
)


@dataclass(frozen=True, kw_only=True)
class CollectiveTraffic:
    """All collectives of one kind over one group in a step, as one rank sees them."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send, receive
    dimension: str  # of the device mesh: tp, cp, pp, replicas (dp and cp), stage (and tp), ep, etp, edp, all
    ranks: int
    count: int
    bytes: int  # of the larger side on one rank: output of an all-gather, input of a reduce-scatter


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"


class _TrafficCounter:
    """Sums of collectives; groups of one rank are skipped."""

    def __init__(self, config: RunConfig):
        parallel = config.parallel
        replicas, edp = parallel.dp_cp_size, parallel.expert_dp_size
        self._ranks = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
        self._ranks |= {"replicas": replicas, "stage": replicas * parallel.tp, "edp": edp}
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
            if has_explicit_layers(config):
                _add_explicit_layer(counter, config, index < stage.recomputed)
                continue
            for number, block in enumerate(blocks):
                _add_block(counter, config, block, index < stage.recomputed, is_last=number == len(blocks) - 1)
        _add_ends(counter, config, stage)
        _add_sharding(counter, config, stage)
    return list(counter)


def _add_explicit_layer(counter: _TrafficCounter, config: RunConfig, recomputed: bool) -> None:
    """Add the collectives of a Llama layer.

    Gathered are the normed inputs of attention and MLP, in backward the gradients of their outputs, and the inputs
    again unless they were saved: all of them as GEMMs take them, in fp8 one byte per value. With many scales per tensor
    what is reduced over tokens is gathered in bf16. Keys and values are never gathered again.
    """
    sizes = ActivationSizes(config)
    work, values, value_bytes = sizes.work, sizes.tokens * config.model.hidden, sizes.value_bytes
    gathers = 6 + 2 * recomputed if recomputed or not work.save_norm_outputs else 4
    unquantized = 4 if sizes.has_many_scales else 0
    counter.add(ALL_GATHER, "tp", work.ga * (gathers - unquantized), values * sizes.gemm_bytes)
    counter.add(ALL_GATHER, "tp", work.ga * unquantized, values * value_bytes)
    repeated = (1 + config.model.post_norms) if recomputed else 0  # the MLP's output only for its post-norm
    counter.add(REDUCE_SCATTER, "tp", work.ga * (4 + repeated), values * value_bytes)
    size = work.mbs * work.seqlen * _kv_width(config.model) / config.parallel.tp * value_bytes
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        counter.add(kind, "cp", work.ga, size)


def _add_block(counter: _TrafficCounter, config: RunConfig, block: str, recomputed: bool, is_last: bool) -> None:
    """Add the collectives of one block: all-gather before and reduce-scatter after it, in backward the reverse.

    A recomputed layer all-gathers again; the reduce-scatter after its last block is not needed.
    """
    sizes, model, parallel = ActivationSizes(config), config.model, config.parallel
    work, tokens, value_bytes = sizes.work, sizes.tokens, sizes.value_bytes
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
    """Add the collectives of routed tokens and their padding: dispatch and combine, forward and backward."""
    sizes = ActivationSizes(config)
    work, sent = sizes.work, dispatched_rows(config) * config.model.hidden * sizes.value_bytes
    counter.add(ALL_TO_ALL, "ep", work.ga * (4 + 2 * recomputed), sent)
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        counter.add(kind, "etp", work.ga * (2 + recomputed), sent * config.parallel.etp)


def _add_ends(counter: _TrafficCounter, config: RunConfig, stage: StageShape) -> None:
    """Add the collectives of the residual after the embedding, before the LM head and between pipeline stages."""
    sizes = ActivationSizes(config)
    work, residual = sizes.work, sizes.tokens * config.model.hidden * sizes.value_bytes
    for present in (stage.first, stage.last):
        counter.add(REDUCE_SCATTER, "tp", work.ga * present, residual)
        counter.add(ALL_GATHER, "tp", work.ga * present, residual)
    neighbours = (not stage.first) + (not stage.last)
    for kind in ("send", "receive"):
        counter.add(kind, "pp", work.ga * neighbours, residual / config.parallel.tp)
        if config.model.tied_embeddings and (stage.first != stage.last):
            (tied,) = weight_buckets(end_weights(config.model, stage), config.parallel)
            counter.add(kind, "pp", 1, tied.shard * gradient_bytes(config))


def _add_sharding(counter: _TrafficCounter, config: RunConfig, stage: StageShape) -> None:
    """Add the all-gathers of weights and reduce-scatters of gradients over replicas, unit by unit.

    FSDP gathers a layer for each pass, except that the last layer of the network stays from forward to backward, and
    reduces its gradients after each. Embedding and LM head are gathered once per step, as is everything without FSDP,
    where gradients are reduced once, too. So are those of fp32 weights, which are replicated.
    """
    sizes, fsdp, replicated = ActivationSizes(config), config.parallel.fsdp, Counter[str]()
    work, value_bytes = sizes.work, sizes.value_bytes
    reduced_bytes = BYTES["fp32" if config.precision.dtype == "fp32" else work.reduce_dtype]
    for number, weights in enumerate(stage_units(config.model, stage)):  # 0: embedding and LM head
        stays = stage.last and number == len(stage.layers)
        gathers = work.ga * (1 if stays else 2) if fsdp and number else 1
        for bucket in weight_buckets(weights, config.parallel):
            counter.add(ALL_GATHER, bucket.replicas, gathers, bucket.size * value_bytes)
            counter.add(REDUCE_SCATTER, bucket.replicas, work.ga if fsdp else 1, bucket.size * reduced_bytes)
        for weight in weights:
            if not weight.is_matrix:
                replicated[weight.replicas(config.parallel)] += weight.on_rank(config.parallel).size
    for dimension, values in replicated.items():
        counter.add(ALL_REDUCE, dimension, 1, values * BYTES["fp32"])
