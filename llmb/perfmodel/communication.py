"""What ranks send one another in a step: collectives by kind and group, with their number and bytes.

    step_traffic(config)        by closed form, for a rank of the first stage; a rehearsal counts the real ones

The closed form leaves out exchanges of single numbers and of counts: norms, losses, how many rows travel to experts.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from llmb.config.spec import Model, RunConfig, Training
from llmb.perfmodel.flops import BYTES
from llmb.perfmodel.shards import (
    Part,
    Weight,
    end_weights,
    is_sharded,
    layer_blocks,
    layer_weights,
    rank_parts,
    sharers,
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All exchanges of one kind over one group in a step, as one rank sees them."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send, receive
    dimension: str  # whom it connects: tp, cp, pp, replicas (dp and cp together), ep, etp, edp, all
    ranks: int
    count: int
    bytes: int  # of the larger side on one rank: what an all-gather gives, what a reduce-scatter takes


GATHER, REDUCE, EXCHANGE = "all-gather", "reduce-scatter", "all-to-all"


class _Tally:
    """Exchanges added up; those among one rank are none."""

    def __init__(self, config: RunConfig):
        split = config.parallel
        edp = sharers(Weight((1,), routed=True), split)
        self._ranks = {name: getattr(split, name) for name in ("tp", "cp", "pp", "ep", "etp")}
        self._ranks |= {"replicas": split.sharers, "edp": edp}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, dimension: str, count: int, each: float) -> None:
        if self._ranks[dimension] > 1:
            self._counts[kind, dimension] += count
            self._bytes[kind, dimension] += round(count * each)

    def __iter__(self) -> Iterator[Collective]:
        for (kind, dimension), count in sorted(self._counts.items()):
            size = self._bytes[kind, dimension]
            yield Collective(kind=kind, dimension=dimension, ranks=self._ranks[dimension], count=count, bytes=size)


def step_traffic(config: RunConfig, rank: int = 0) -> list[Collective]:
    """What a rank of this pipeline stage sends and receives in a step."""
    tally = _Tally(config)
    for part in rank_parts(config, rank):
        for place, layer in enumerate(part.layers):
            for number, block in enumerate(layer_blocks(config.model, layer)):
                again = place < part.recomputed
                ends = number == len(layer_blocks(config.model, layer)) - 1
                _add_block(tally, config, block, again, ends)
        _add_ends(tally, config, part)
        _add_sharding(tally, config, part)
    return list(tally)


def _sizes(config: RunConfig) -> tuple[Training, float, float]:
    """The work, tokens a rank sees inside a block, and bytes of a value of the stream."""
    work = config.workload
    assert isinstance(work, Training)
    value = BYTES["fp32" if config.precision.dtype == "fp32" else "bf16"]
    return work, work.mbs * work.seqlen / config.parallel.cp, value


def _add_block(tally: _Tally, config: RunConfig, block: str, again: bool, ends: bool) -> None:
    """Activations around one block: gathered before it, summed behind it, and the other way round backward.

    Computed again, a layer gathers again; the sum behind its last block is not needed.
    """
    work, tokens, value = _sizes(config)
    model, split = config.model, config.parallel
    stream = tokens * model.hidden * value
    widths = [model.hidden]
    if block == "latent_attention" and model.latent:
        widths = [model.latent.q_rank, model.latent.kv_rank + model.latent.rope_dim]
    if block == "experts":
        _add_experts(tally, config, again)
        if not (model.experts and model.experts.shared):
            return
    for width in widths:
        tally.add(GATHER, "tp", work.ga * (1 + again), tokens * width * value)
        tally.add(REDUCE, "tp", work.ga, tokens * width * value)
    tally.add(REDUCE, "tp", work.ga * (1 + (again and not ends)), stream)
    tally.add(GATHER, "tp", work.ga, stream)
    if block in ("attention", "latent_attention"):
        size = work.mbs * work.seqlen * _key_and_value(model) / split.tp * value
        tally.add(GATHER, "cp", work.ga * (1 + again), size)
        tally.add(REDUCE, "cp", work.ga, size)


def _key_and_value(model: Model) -> int:
    """Channels of all heads that attention reads of a token."""
    if model.latent:
        return model.heads * (model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim)
    return 2 * model.kv_heads * model.head_dim


def _add_experts(tally: _Tally, config: RunConfig, again: bool) -> None:
    """Each visiting copy of a token travels to its expert and back, forward and backward."""
    work, tokens, value = _sizes(config)
    model, split = config.model, config.parallel
    assert model.experts is not None
    rows = tokens / split.tp * model.experts.top_k * model.hidden * value
    times = work.ga * (4 + 2 * again)
    tally.add(EXCHANGE, "ep", times, rows)
    tally.add(EXCHANGE, "etp", times, rows * split.etp)


def _add_ends(tally: _Tally, config: RunConfig, part: Part) -> None:
    """The stream as it leaves the embedding, enters the head, and passes between stages."""
    work, tokens, value = _sizes(config)
    stream = tokens * config.model.hidden * value
    for present in (part.first, part.last):
        tally.add(REDUCE, "tp", work.ga * present, stream)
        tally.add(GATHER, "tp", work.ga * present, stream)
    neighbours = (not part.first) + (not part.last)
    for kind in ("send", "receive"):
        tally.add(kind, "pp", work.ga * neighbours, stream / config.parallel.tp)
        if config.model.tied_embeddings and (part.first != part.last):
            (matrix, *_) = end_weights(config.model, part)
            tally.add(kind, "pp", 1, matrix.slice(config.parallel) * BYTES["fp32"])


def _add_sharding(tally: _Tally, config: RunConfig, part: Part) -> None:
    """Weights gathered and gradients reduced over replicas, layer by layer.

    Sharded weights are gathered for each pass; a sharded optimizer's once a step.
    """
    work, _, value = _sizes(config)
    split = config.parallel
    every = split.fsdp
    units = [(layer_weights(config.model, layer), 2 if every else 1) for layer in part.layers]
    units += [(end_weights(config.model, part), 1)]
    times = work.ga if every else 1
    for weights, gathers in units:
        for dimension in ("replicas", "edp"):
            size = sum(_gathered(one, config) for one in weights if _dimension(one, config) == dimension)
            if size:
                tally.add(GATHER, dimension, times * gathers, size * value)
                tally.add(REDUCE, dimension, times, size * BYTES["fp32"])


def _dimension(weight: Weight, config: RunConfig) -> str | None:
    """Over which group a weight is sharded; none: not at all."""
    split = config.parallel
    if not is_sharded(weight, split):
        return None
    return "edp" if weight.routed and split.ep * split.etp > 1 else "replicas"


def _gathered(weight: Weight, config: RunConfig) -> int:
    """All slices together, with what pads them to equal sizes."""
    return weight.slice(config.parallel) * sharers(weight, config.parallel)
