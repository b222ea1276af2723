"""What one rank has of a model and of a step's work, exactly: its layers, weights, slices and FLOPs.

    rank_parts(config, rank=0)        the parts of the network that a rank of this pipeline stage computes
    slices(config, part)              how many numbers of each weight its optimizer updates
    rank_flops(config, rank=0)        what its matrix products, attention and scans compute in a step

Weights are listed by shape, as `llmb/models` makes them and the passes of `llmb/train` cut them: over tp along one
dimension or not at all, routed experts over ep and etp, then everything over the replicas, along the first dimension
that divides.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import Model, Parallel, RunConfig, Training
from llmb.perfmodel.flops import BLOCKS, odd_fp8_widths


@dataclass(frozen=True, kw_only=True)
class Part:
    """One stage of the pipeline, or the whole network."""

    layers: range
    first: bool  # has the embedding
    last: bool  # has the norm and the head
    recomputed: int  # of its layers, from the first on
    offloaded: int  # of those after them


@dataclass(frozen=True)
class Weight:
    """One parameter: its whole shape and the dimension along which tp (or etp) cuts it."""

    shape: tuple[int, ...]
    cut: int | None = None
    routed: bool = False  # of the experts: ep cuts dimension 0
    whole: bool = False  # used in fp32, so replicas hold it whole

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def on_rank(self, split: Parallel) -> "Weight":
        """What a rank computes with."""
        shape = list(self.shape)
        if self.routed and split.ep * split.etp > 1:
            shape[0] //= split.ep
            shape[self.cut or 0] //= split.etp
        elif self.cut is not None and not self.routed:
            shape[self.cut] //= split.tp
        return replace(self, shape=tuple(shape))

    def slice(self, split: Parallel) -> int:
        """How many of its numbers the optimizer of the first replica updates: no other has more."""
        here, replicas = self.on_rank(split), sharers(self, split)
        if replicas == 1 or (self.whole and split.sharers > 1):
            return here.size
        if any(length % replicas == 0 for length in here.shape):
            return here.size // replicas
        if self.cut == 0 and split.tp > 1:
            return here.size
        return -(-here.shape[0] // replicas) * (here.size // here.shape[0])


def sharers(weight: Weight, split: Parallel) -> int:
    """Ranks that hold the same part of a weight."""
    if weight.routed and split.ep * split.etp > 1:
        return split.expert_sharers
    return split.sharers


def is_sharded(weight: Weight, split: Parallel) -> bool:
    """Whether replicas share a weight."""
    return sharers(weight, split) > 1 and weight.slice(split) < weight.on_rank(split).size


def rank_parts(config: RunConfig, rank: int = 0) -> list[Part]:
    """The parts of one rank of the pipeline; recompute and offload count its layers from the first part on."""
    work, split = config.workload, config.parallel
    assert isinstance(work, Training)
    stages = stage_layers(config.model.layers, split.pp, split.vp)
    again, away, parts = work.recompute_layers, work.offload_layers, []
    for number in range(rank, len(stages), split.pp):
        layers = stages[number]
        recomputed = min(again, len(layers))
        offloaded = min(away, len(layers) - recomputed)
        again, away = again - recomputed, away - offloaded
        ends = {"first": number == 0, "last": number == len(stages) - 1}
        parts.append(Part(layers=layers, recomputed=recomputed, offloaded=offloaded, **ends))
    return parts


def layer_blocks(model: Model, layer: int) -> tuple[str, ...]:
    """The blocks of a layer, in order."""
    if model.pattern is not None:
        return ({"M": "mamba", "*": "attention", "-": "mlp"}[model.pattern[layer]],)
    routed = model.experts is not None and layer >= model.experts.dense_layers
    return "latent_attention" if model.latent else "attention", "experts" if routed else "mlp"


def layer_weights(model: Model, layer: int) -> list[Weight]:
    """All parameters of a layer, the norms before (and behind) its blocks included."""
    blocks = layer_blocks(model, layer)
    norms = len(blocks) * (2 if model.post_norms else 1)
    return [Weight((model.hidden,))] * norms + [one for block in blocks for one in block_weights(model, block)]


def block_weights(model: Model, block: str) -> list[Weight]:
    """The parameters of one kind of block."""
    hidden, width, kv_width = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    if block == "attention":
        return [*(Weight((n, hidden), 0) for n in (width, kv_width, kv_width)), Weight((hidden, width), 1)]
    if block == "mlp":
        return _mlp(hidden, model.ffn, 3 if model.gated else 2)
    if block == "experts":
        assert model.experts is not None
        e = model.experts
        one = _mlp(hidden, e.ffn, 3)
        routed = [Weight((e.count, *matrix.shape), 1 + (matrix.cut or 0), routed=True) for matrix in one]
        shared = _mlp(hidden, e.shared * e.ffn, 3) if e.shared else []
        return [Weight((e.count, hidden), whole=True), *routed, *shared]
    if block == "mamba":
        assert model.mamba is not None
        m = model.mamba
        inner, both = m.heads * m.head_dim, 2 * m.groups * m.state
        vectors = [(inner + both, 1, m.conv), (inner + both,), (m.heads,), (m.heads,), (m.heads,), (inner,)]
        ends = [Weight((2 * inner + both + m.heads, hidden), 0), Weight((hidden, inner), 1)]
        return [*ends, *(Weight(shape, 0, whole=True) for shape in vectors)]
    assert model.latent is not None
    low = model.latent
    key = low.nope_dim + low.rope_dim
    down = [Weight((low.q_rank, hidden)), Weight((low.kv_rank + low.rope_dim, hidden))]
    up = [Weight((model.heads * key, low.q_rank), 0)]
    up += [Weight((model.heads * (low.nope_dim + low.value_dim), low.kv_rank), 0)]
    norms = [Weight((low.q_rank,)), Weight((low.kv_rank,))]
    return [*down, *norms, *up, Weight((hidden, model.heads * low.value_dim), 1)]


def _mlp(hidden: int, ffn: int, matrices: int) -> list[Weight]:
    return [Weight((ffn, hidden), 0)] * (matrices - 1) + [Weight((hidden, ffn), 1)]


def end_weights(model: Model, part: Part) -> list[Weight]:
    """Embedding, norm and head, where a part has them."""
    matrix, tied = Weight((model.vocab, model.hidden), 0), model.tied_embeddings
    matrices = [matrix] * (part.first or (part.last and tied)) + [matrix] * (part.last and not tied)
    return matrices + [Weight((model.hidden,))] * part.last


def part_weights(model: Model, part: Part) -> Iterator[Weight]:
    """All parameters of a part."""
    yield from end_weights(model, part)
    for layer in part.layers:
        yield from layer_weights(model, layer)


def is_halved(config: RunConfig) -> bool:
    """Whether the native engine keeps weights in two halves, of which products take the bf16 one: on one rank."""
    native = config.engine == "native" and isinstance(config.workload, Training)
    return native and config.parallel.world_size == 1 and config.precision.dtype in ("bf16", "fp8")


def is_fused(config: RunConfig) -> bool:
    """Whether the native engine computes whole layers by hand: those of a Llama with halved weights, on a GPU."""
    plain = config.model.architecture == "llama" and config.model.activation == "silu"
    fits = config.precision.dtype != "fp8" or not odd_fp8_widths(config.model)
    return is_halved(config) and plain and config.machine.gpu != "cpu" and fits


def gradient_bytes(config: RunConfig) -> int:
    """Of a number: two where a weight's gradient is one product, rounded once, or where that was asked for."""
    work = config.workload
    assert isinstance(work, Training)
    return 2 if is_halved(config) and (work.ga == 1 or work.gradients == "bf16") else 4


def rank_parameters(config: RunConfig, rank: int = 0) -> int:
    """How many numbers the optimizer of a rank of this pipeline stage updates."""
    weights = (one for part in rank_parts(config, rank) for one in part_weights(config.model, part))
    return sum(weight.slice(config.parallel) for weight in weights)


def rank_flops(config: RunConfig, rank: int = 0) -> float:
    """FLOPs of a step on one rank: 6 a MAC, and 2 more for what is computed again.

    As `costs.train_flops_per_sequence` counts them, and the routers besides: they are executed.
    """
    work, model, split = config.workload, config.model, config.parallel
    assert isinstance(work, Training)
    pairs = work.seqlen * work.seqlen / (1 if config.flops_convention == "full" else 2)
    flops = 0.0
    for part in rank_parts(config, rank):
        for place, layer in enumerate(part.layers):
            macs = sum(_macs(model, block, work.seqlen, pairs) for block in layer_blocks(model, layer))
            again = work.seqlen * macs_again(model) if is_fused(config) else macs
            flops += 6 * macs + (2 * again if place < part.recomputed else 0)
        flops += 6 * work.seqlen * model.hidden * model.vocab * part.last
    return flops * work.mbs * work.ga / (split.tp * split.cp)


def macs_again(model: Model) -> int:
    """A token's, in a recomputed layer that is computed by hand: queries, what attention gives, gate and up."""
    return 2 * model.hidden * (model.heads * model.head_dim + model.ffn)


def _macs(model: Model, kind: str, seqlen: int, pairs: float) -> float:
    """Of one sequence going forward through a block."""
    block = BLOCKS[kind](model)
    router = model.hidden * model.experts.count if kind == "experts" and model.experts else 0
    return seqlen * (block.token_macs + block.scan_macs + router) + pairs * block.pair_macs
