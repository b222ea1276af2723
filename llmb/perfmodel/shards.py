"""Layers, weights, optimizer shards and FLOPs of one rank, exactly.

    rank_stages(config, rank=0)         pipeline stages of a rank
    rank_parameters(config, rank=0)     number of parameters that its optimizer updates
    rank_flops(config, rank=0)          FLOPs of its GEMMs, attention and scans in a step

Weights are listed by shape, as `llmb/models` creates them and `llmb/train` splits them: over tp along one dimension or
not at all, routed experts over ep and etp. The matrices of a layer are then flattened into buckets, which the ranks
that hold the same ones share equally; vectors and routers stay whole.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from llmb.config.model import BLOCKS_BY_LETTER, Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import Parallel, RunConfig, Training
from llmb.perfmodel.block_costs import BLOCK_COSTS
from llmb.perfmodel.flops import attention_pairs

BUCKET_ALIGNMENT = 8  # elements, of matrices and shards: GEMMs take operands aligned to 16 bytes


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """One pipeline stage, or the whole network."""

    layers: range
    first: bool  # has the embedding
    last: bool  # has the final norm and the LM head
    recomputed: int  # number of its layers, from the first on
    offloaded: int  # number of the layers after them


@dataclass(frozen=True)
class Weight:
    """One parameter: its full shape, and the dimension that tp (or etp) splits."""

    shape: tuple[int, ...]
    shard_dim: int | None = None
    routed: bool = False  # of the routed experts: ep splits dimension 0
    replicated: bool = False  # used in fp32, as all vectors are

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Return whether replicas share it in a bucket; anything else is fp32 and whole on each of them."""
        return len(self.shape) > 1 and not self.replicated

    def on_rank(self, parallel: Parallel) -> "Weight":
        """Return the shard that a rank computes with."""
        shape = list(self.shape)
        if self.routed and parallel.ep * parallel.etp > 1:
            shape[0] //= parallel.ep
            shape[self.shard_dim or 0] //= parallel.etp
        elif self.shard_dim is not None and not self.routed:
            shape[self.shard_dim] //= parallel.tp
        return Weight(tuple(shape), self.shard_dim, self.routed, self.replicated)

    def replicas(self, parallel: Parallel) -> str:
        """Return the mesh dimension of the ranks that hold the same part of it."""
        if self.routed and parallel.ep * parallel.etp > 1:
            return "edp"
        return "stage" if parallel.tp > 1 and (self.routed or self.shard_dim is None) else "replicas"


@dataclass(frozen=True)
class WeightBucket:
    """Matrices of a layer that the same ranks hold, in values; see `llmb/train/parallel/bucket.py`."""

    replicas: str  # mesh dimension
    ranks: int
    shard: int  # of each rank, padding included
    unpadded: int  # of the first rank, without padding: the most that any has

    @property
    def size(self) -> int:
        """Values of all shards."""
        return self.ranks * self.shard


def weight_buckets(weights: Iterable[Weight], parallel: Parallel) -> tuple[WeightBucket, ...]:
    """Return the buckets of a layer's matrices, or of those outside of layers."""
    return _weight_buckets(tuple(weights), parallel)


@lru_cache(maxsize=64)
def _weight_buckets(weights: tuple[Weight, ...], parallel: Parallel) -> tuple[WeightBucket, ...]:
    ranks = {
        "replicas": parallel.dp_cp_size,
        "stage": parallel.dp_cp_size * parallel.tp,
        "edp": parallel.expert_dp_size,
    }
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for weight in weights:
        if weight.is_matrix:
            shapes.setdefault(weight.replicas(parallel), []).append(weight.on_rank(parallel).shape)
    return tuple(_bucket(replicas, ranks[replicas], listed) for replicas, listed in shapes.items())


def _bucket(replicas: str, ranks: int, shapes: list[tuple[int, ...]]) -> WeightBucket:
    offsets, shard = bucket_layout(shapes, ranks)
    sizes = map(math.prod, shapes)
    unpadded = sum(max(0, min(size, shard - offset)) for offset, size in zip(offsets, sizes, strict=True))
    return WeightBucket(replicas, ranks, shard, unpadded)


def bucket_layout(shapes: Sequence[Sequence[int]], ranks: int) -> tuple[list[int], int]:
    """Return where each matrix begins in its flat bucket, and the values of a rank's shard, padding included.

    A matrix is aligned if its rows can be; consecutive ones of one width are contiguous.
    """
    offsets, end = [], 0
    for shape in shapes:
        if shape[-1] % BUCKET_ALIGNMENT == 0:
            end = _aligned(end)
        offsets.append(end)
        end += math.prod(shape)
    return offsets, _aligned(-(-end // ranks))


def _aligned(size: int) -> int:
    return -(-size // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT


def replicated_values(weights: Iterable[Weight], parallel: Parallel) -> int:
    """Return the number of values of fp32 weights that are not in buckets."""
    return sum(weight.on_rank(parallel).size for weight in weights if not weight.is_matrix)


def rank_stages(config: RunConfig, rank: int = 0) -> list[StageShape]:
    """Return the stages of a pipeline rank; recompute and offload count its layers from the first stage on."""
    work, parallel = config.workload, config.parallel
    assert isinstance(work, Training)
    all_stages = stage_layers(config.model.layers, parallel.pp, parallel.vp)
    recompute_left, offload_left, stages = work.recompute_layers, work.offload_layers, []
    for index in range(rank, len(all_stages), parallel.pp):
        layers = all_stages[index]
        recomputed = min(recompute_left, len(layers))
        offloaded = min(offload_left, len(layers) - recomputed)
        recompute_left, offload_left = recompute_left - recomputed, offload_left - offloaded
        ends = {"first": index == 0, "last": index == len(all_stages) - 1}
        stages.append(StageShape(layers=layers, recomputed=recomputed, offloaded=offloaded, **ends))
    return stages


def layer_blocks(model: Model, layer: int) -> tuple[str, ...]:
    """Return the kinds of the blocks of a layer, in order."""
    if model.pattern is not None:
        return (BLOCKS_BY_LETTER[model.pattern[layer]],)
    is_moe = model.experts is not None and layer >= model.experts.dense_layers
    return "mla" if model.mla else "attention", "experts" if is_moe else "mlp"


def layer_weights(model: Model, layer: int) -> list[Weight]:
    """Return all parameters of a layer, including the norms before (and after) its blocks."""
    blocks = layer_blocks(model, layer)
    norms = len(blocks) * (model.pre_norms + model.post_norms)
    return [Weight((model.hidden,))] * norms + [weight for block in blocks for weight in block_weights(model, block)]


def block_weights(model: Model, block: str) -> list[Weight]:
    """Return the parameters of one kind of block."""
    hidden, width, kv_width = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    if block == "attention":
        matrices = [*(Weight((n, hidden), 0) for n in (width, kv_width, kv_width)), Weight((hidden, width), 1)]
        biases = [Weight((n,), 0) for n in (width, kv_width, kv_width)] * model.qkv_bias
        norm_widths = {None: (), "head": (model.head_dim, model.head_dim), "projection": (width, kv_width)}
        norms = [Weight((n,)) for n in norm_widths[model.qk_norm]]
        sinks = [Weight((model.heads,), 0)] * model.attention_sinks
        return [*matrices, *biases, *norms, *[Weight((hidden,))] * model.o_bias, *sinks]
    if block == "mlp":
        return _mlp(hidden, model.ffn, 3 if model.gated else 2)
    if block == "experts":
        assert model.experts is not None
        e = model.experts
        expert = _mlp(hidden, e.ffn, 3)
        routed = [Weight((e.count, *matrix.shape), 1 + (matrix.shard_dim or 0), routed=True) for matrix in expert]
        biases = [Weight((e.count, matrix.shape[0]), 0, routed=True) for matrix in expert] if e.bias else []
        shared = _mlp(hidden, e.shared * e.ffn, 3) if e.shared else []
        router = [Weight((e.count, hidden), replicated=True)] + [Weight((e.count,))] * e.bias
        return [*router, *(weight for pair in zip_longest(routed, biases) for weight in pair if weight), *shared]
    if block == "mamba":
        assert model.mamba is not None
        m = model.mamba
        inner, b_and_c = m.heads * m.head_dim, 2 * m.groups * m.state
        vectors = [(inner + b_and_c, 1, m.conv), (inner + b_and_c,), (m.heads,), (m.heads,), (m.heads,), (inner,)]
        projections = [Weight((2 * inner + b_and_c + m.heads, hidden), 0), Weight((hidden, inner), 1)]
        return [*projections, *(Weight(shape, 0, replicated=True) for shape in vectors)]
    assert model.mla is not None
    ranks = model.mla
    key = ranks.nope_dim + ranks.rope_dim
    down = [Weight((ranks.q_rank, hidden)), Weight((ranks.kv_rank + ranks.rope_dim, hidden))]
    up = [Weight((model.heads * key, ranks.q_rank or hidden), 0)]
    up += [Weight((model.heads * (ranks.nope_dim + ranks.value_dim), ranks.kv_rank), 0)]
    latent_norms = [Weight((ranks.q_rank,)), Weight((ranks.kv_rank,))]
    return [*down, *latent_norms, *up, Weight((hidden, model.heads * ranks.value_dim), 1)]


def _mlp(hidden: int, ffn: int, matrices: int) -> list[Weight]:
    return [Weight((ffn, hidden), 0)] * (matrices - 1) + [Weight((hidden, ffn), 1)]


def end_weights(model: Model, stage: StageShape) -> list[Weight]:
    """Return the embedding, final norm and LM head that a stage has."""
    matrix, tied = Weight((model.vocab, model.hidden), 0), model.tied_embeddings
    matrices = [matrix] * (stage.first or (stage.last and tied)) + [matrix] * (stage.last and not tied)
    return matrices + [Weight((model.hidden,))] * stage.last


def stage_units(model: Model, stage: StageShape) -> list[list[Weight]]:
    """Return the weights of a stage's FSDP units: embedding, LM head and final norm together, and each layer."""
    return [end_weights(model, stage), *(layer_weights(model, layer) for layer in stage.layers)]


def has_explicit_layers(config: RunConfig) -> bool:
    """Return whether the native engine trains the layer with explicit backward (`models/llama_layer`)."""
    native = config.engine == "native" and isinstance(config.workload, Training)
    return native and has_llama_layers(config.model)


def gradient_bytes(config: RunConfig) -> int:
    """Return the bytes per gradient value: 2 if requested, or with one contribution a step, which is rounded once."""
    work = config.workload
    assert isinstance(work, Training)
    may_be_bf16 = config.engine == "native" and config.precision.dtype in ("bf16", "fp8")
    is_single = config.parallel.world_size == 1 and work.ga == 1
    return 2 if may_be_bf16 and (is_single or work.gradients == "bf16") else 4


def rank_parameters(config: RunConfig, rank: int = 0) -> int:
    """Return the number of parameters that the optimizer of a pipeline rank updates."""
    parallel, count = config.parallel, 0
    for stage in rank_stages(config, rank):
        for unit in stage_units(config.model, stage):
            count += sum(bucket.unpadded for bucket in weight_buckets(unit, parallel)) + replicated_values(
                unit, parallel
            )
    return count


def rank_flops(config: RunConfig, rank: int = 0) -> float:
    """Return the FLOPs of a step on one rank: 6 per MAC, and 2 more for recomputation.

    Counted as in `flops.train_flops_per_sequence`, plus the routers, which are executed.
    """
    work, model, parallel = config.workload, config.model, config.parallel
    assert isinstance(work, Training)
    flops = 0.0
    for stage in rank_stages(config, rank):
        for index, layer in enumerate(stage.layers):
            window = model.window if model.attention_kind(layer) == "S" else None
            pairs = attention_pairs(work.seqlen, config.flops_convention, window)
            macs = sum(_macs(model, block, work.seqlen, pairs) for block in layer_blocks(model, layer))
            recomputed = work.seqlen * recomputed_macs_per_token(model) if has_explicit_layers(config) else macs
            flops += 6 * macs + (2 * recomputed if index < stage.recomputed else 0)
        flops += 6 * work.seqlen * model.hidden * model.vocab * stage.last
    return flops * work.mbs * work.ga / (parallel.tp * parallel.cp)


def recomputed_macs_per_token(model: Model) -> int:
    """Return the MACs per token that a recomputed explicit layer repeats: query, output, gate and up projections.

    With post-norms also the down projection, whose output one of them takes.
    """
    return model.hidden * (2 * model.heads * model.head_dim + (2 + model.post_norms) * model.ffn)


def _macs(model: Model, kind: str, seqlen: int, pairs: float) -> float:
    """Return the forward MACs of one sequence through a block, router included."""
    block = BLOCK_COSTS[kind](model)
    router = model.hidden * model.experts.count if kind == "experts" and model.experts else 0
    return seqlen * (block.token_macs + block.scan_macs + router) + pairs * block.pair_macs
