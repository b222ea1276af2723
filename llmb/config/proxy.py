"""Stand-ins for a model, derived from it by rule.

    small(model)                 every structural feature, a few million parameters: runs anywhere in seconds
    small(model, parallel)       the same, grown just enough that the layout divides it
    true_width(model, fits)      the real layers, as many as a memory holds: kernels run at full size

Small: few layers of each kind, narrow, few experts; the ratio of query to key heads, the kinds of layers, routing by
groups, shared experts, low-rank projections and the scan stay. A layout adds heads, groups, layers and experts until
each rank has its share, of a size that 8-bit products take; the stream stays as narrow as it is. True width: layers go
first; where even one layer of each kind is too large, experts go too, as a layer of 256 experts takes more memory in
training than any GPU has.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from llmb.config.spec import Experts, Latent, Mamba, Model, Parallel
from llmb.errors import ConfigError

WIDTH = 256  # about; heads of a power of two each
VOCAB = 4096
LAYERS = 4
EXPERTS = 16
ONE_RANK = Parallel()
UNIT = 16  # 8-bit products take only dimensions that are multiples of this, and on each rank


def small(model: Model, split: Parallel = ONE_RANK) -> Model:
    """The same structure in a few million parameters, which this layout of the real model divides."""
    shared_by = model.heads // model.kv_heads  # query heads that share a key head
    few = min(model.kv_heads, 4 if shared_by == 1 else 2)
    head_dim = 1 << ((WIDTH // (few * shared_by)).bit_length() - 1)
    hidden = few * shared_by * head_dim
    kv_heads = math.lcm(few, split.tp)
    layers = _layers(model, split)
    return replace(
        model,
        layers=layers,
        pattern=model.pattern[:layers] if model.pattern is not None else None,
        hidden=hidden,
        ffn=_multiple(_narrowed(model.ffn, model, hidden), UNIT * split.tp),
        heads=kv_heads * shared_by,
        kv_heads=kv_heads,
        head_dim=max(head_dim, UNIT * split.tp // kv_heads),
        vocab=_multiple(min(model.vocab, VOCAB), split.tp),
        experts=_few(model.experts, model, hidden, split) if model.experts else None,
        latent=Latent(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32) if model.latent else None,
        mamba=_short(model.mamba, hidden, split.tp) if model.mamba else None,
    )


def _layers(model: Model, split: Parallel) -> int:
    """Few, but of each kind one, and as many for one stage of the pipeline as for another."""
    few = min(model.layers, LAYERS) if model.pattern is None else _fewest_layers(model)
    return min(model.layers, _multiple(few, split.pp * (split.vp or 1)))


def _multiple(number: int, of: int) -> int:
    """The number, or the next one that can be divided."""
    return -(-number // of) * of


def _narrowed(width: int, model: Model, hidden: int) -> int:
    """A width in its proportion to the model's, in steps that every kernel takes."""
    return max(32, round(width * hidden / model.hidden / 32) * 32)


def _few(experts: Experts, model: Model, hidden: int, split: Parallel) -> Experts:
    groups = min(experts.groups, 4)
    shares = math.lcm(split.etp, split.tp if experts.shared else 1)  # shared experts are split as dense MLPs are
    return replace(
        experts,
        count=math.lcm(min(experts.count, EXPERTS), split.ep),
        top_k=min(experts.top_k, 4),
        ffn=_multiple(_narrowed(experts.ffn, model, hidden), UNIT * shares),
        dense_layers=min(experts.dense_layers, 1),
        groups=groups,
        top_groups=groups if experts.top_groups == experts.groups else groups // 2,
    )


def _short(mamba: Mamba, hidden: int, tp: int) -> Mamba:
    """Its inward projection ends in one output a head, so that heads too come in units."""
    fewest = 2 * hidden // 32
    heads = _multiple(fewest, UNIT * tp)
    head_dim = max(UNIT, 32 * fewest // heads)
    return replace(mamba, heads=heads, head_dim=head_dim, groups=math.lcm(min(mamba.groups, 2), tp), state=32, chunk=32)


def true_width(model: Model, fits: Callable[[Model], bool]) -> Model:
    """The largest of the smaller models that fits, or an error that names the smallest there is."""
    smallest = model
    for candidate in smaller(model):
        if fits(candidate):
            return candidate
        smallest = candidate
    raise ConfigError(f"{model.name} does not fit at its true width, even with {describe_change(model, smallest)}")


def smaller(model: Model) -> Iterator[Model]:
    """The model with ever fewer layers; then, at the fewest, with ever fewer experts."""
    fewest = _fewest_layers(model)
    for layers in range(model.layers, fewest - 1, -1):
        yield _with_layers(model, layers)
    least = _with_layers(model, fewest)
    experts = least.experts
    while experts is not None and experts.count // 2 >= max(2 * experts.top_k, experts.groups):
        experts = replace(experts, count=experts.count // 2)
        yield replace(least, experts=experts)


def _fewest_layers(model: Model) -> int:
    """One layer of each kind."""
    if model.pattern is not None:
        return max(model.pattern.index(kind) for kind in set(model.pattern)) + 1
    return 2 if model.experts and model.experts.dense_layers else 1


def _with_layers(model: Model, layers: int) -> Model:
    """The first layers of the stack; leading dense layers give way so that a layer of experts remains."""
    experts = model.experts
    if experts is not None:
        experts = replace(experts, dense_layers=min(experts.dense_layers, layers - 1))
    pattern = model.pattern[:layers] if model.pattern is not None else None
    return replace(model, layers=layers, pattern=pattern, experts=experts)


def describe_change(model: Model, changed: Model) -> str:
    """What a stand-in leaves out, in words."""
    words = [f"{changed.layers} of {model.layers} layers"]
    if changed.hidden != model.hidden:
        words.append(f"width {changed.hidden} of {model.hidden}")
    if model.experts and changed.experts and changed.experts.count != model.experts.count:
        words.append(f"{changed.experts.count} of {model.experts.count} experts")
    if changed.vocab != model.vocab:
        words.append(f"vocabulary {changed.vocab} of {model.vocab}")
    return ", ".join(words)
