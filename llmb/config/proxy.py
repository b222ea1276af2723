"""Proxy models, derived from a real model by rule.

    small_proxy(model)               every structural feature, a few million parameters: runs anywhere in seconds
    small_proxy(model, parallel)     the same, enlarged just enough for the layout to divide it
    true_width_proxy(model, fits)    the real layers, as many as fit into memory: kernels run at full size

A small proxy has few layers of each kind, a small hidden size and few experts, and keeps the ratio of query to KV
heads, the kinds of layers, group-limited routing, shared experts, low-rank projections and the scan. For a layout it
gets more heads, groups, layers and experts until each rank has its shard, of a size that fp8 GEMMs support; the hidden
size stays. A true-width proxy drops layers first and experts only when one layer of each kind is still too large: a
layer of 256 experts takes more memory in training than any GPU has.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from llmb.config.model import MambaConfig, MlaConfig, Model, MoEConfig, RopeConfig
from llmb.config.spec import Parallel
from llmb.errors import ConfigError

WIDTH = 256  # approximate hidden size; head_dim is a power of two
VOCAB = 4096
LAYERS = 4
EXPERTS = 16
ONE_RANK = Parallel()
ALIGNMENT = 16  # fp8 GEMMs need dimensions that are multiples of this, on each rank


def small_proxy(model: Model, layout: Parallel = ONE_RANK, multiple: int = ALIGNMENT) -> Model:
    """Return a model of the same structure with a few million parameters, which the layout divides.

    Widths that GEMMs sum are multiples of `multiple` on each rank.
    """
    group = model.heads // model.kv_heads  # query heads per KV head
    kv_heads = min(model.kv_heads, 4 if group == 1 else 2)
    if not 1 <= kv_heads * group <= WIDTH:
        raise ConfigError(
            f"model.heads={model.heads}, model.kv_heads={model.kv_heads}: a small proxy has 1 to {WIDTH} heads, "
            f"not {kv_heads * group}"
        )
    head_dim = 1 << ((WIDTH // (kv_heads * group)).bit_length() - 1)
    hidden = kv_heads * group * head_dim
    kv_heads = math.lcm(kv_heads, layout.tp)
    head_dim = max(head_dim, multiple * layout.tp // kv_heads)
    layers = _layer_count(model, layout)
    return replace(
        model,
        layers=layers,
        pattern=model.pattern[:layers] if model.pattern is not None else None,
        hidden=hidden,
        ffn=_round_up(_scaled_width(model.ffn, model, hidden), multiple * layout.tp),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_small_rope(model.rope, head_dim) if model.rope else None,
        vocab=_round_up(min(model.vocab, VOCAB), layout.tp),
        experts=_small_moe(model.experts, model, hidden, layout) if model.experts else None,
        mla=MlaConfig(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32) if model.mla else None,
        mamba=_small_mamba(model.mamba, hidden, layout.tp) if model.mamba else None,
    )


def _small_rope(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """Return RoPE with factors for as many pairs as rotate in a head of another width."""
    pairs = int(head_dim * rope.partial_rotary_factor) // 2
    short, long = (
        tuple(factors[index * len(factors) // pairs] for index in range(pairs)) if factors else ()
        for factors in (rope.short_factors, rope.long_factors)
    )
    return replace(rope, short_factors=short, long_factors=long)


def _layer_count(model: Model, layout: Parallel) -> int:
    """Return a few layers, at least one of each kind, and equally many for every pipeline stage."""
    few = min(model.layers, LAYERS) if model.pattern is None else _fewest_layers(model)
    return min(model.layers, _round_up(few, layout.pp * (layout.vp or 1)))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _scaled_width(width: int, model: Model, hidden: int) -> int:
    """Scale a width with the hidden size, in multiples that every kernel supports."""
    return max(32, round(width * hidden / model.hidden / 32) * 32)


def _small_moe(experts: MoEConfig, model: Model, hidden: int, layout: Parallel) -> MoEConfig:
    groups = min(experts.groups, 4)
    shards = math.lcm(layout.etp, layout.tp if experts.shared else 1)  # shared experts are split like dense MLPs
    return replace(
        experts,
        count=math.lcm(min(experts.count, EXPERTS), layout.ep),
        top_k=min(experts.top_k, 4),
        ffn=_round_up(_scaled_width(experts.ffn, model, hidden), ALIGNMENT * shards),
        dense_layers=min(experts.dense_layers, 1),
        groups=groups,
        top_groups=groups if experts.top_groups == experts.groups else groups // 2,
    )


def _small_mamba(mamba: MambaConfig, hidden: int, tp: int) -> MambaConfig:
    """Return a small Mamba; its input projection has one output per head (dt), so heads are aligned too."""
    fewest = 2 * hidden // 32
    heads = _round_up(fewest, ALIGNMENT * tp)
    head_dim = max(ALIGNMENT, 32 * fewest // heads)
    return replace(mamba, heads=heads, head_dim=head_dim, groups=math.lcm(min(mamba.groups, 2), tp), state=32, chunk=32)


def true_width_proxy(model: Model, fits: Callable[[Model], bool]) -> Model:
    """Return the largest reduced model that fits; a ConfigError names the smallest one."""
    smallest = model
    for candidate in reduced_models(model):
        if fits(candidate):
            return candidate
        smallest = candidate
    raise ConfigError(f"{model.name} does not fit at its true width, even with {describe_change(model, smallest)}")


def reduced_models(model: Model) -> Iterator[Model]:
    """Yield the model with fewer and fewer layers, then, at the minimum, with fewer and fewer experts."""
    fewest = _fewest_layers(model)
    for layers in range(model.layers, fewest - 1, -1):
        yield _with_layers(model, layers)
    smallest = _with_layers(model, fewest)
    experts = smallest.experts
    while experts is not None and experts.count // 2 >= max(2 * experts.top_k, experts.groups):
        experts = replace(experts, count=experts.count // 2)
        yield replace(smallest, experts=experts)


def _fewest_layers(model: Model) -> int:
    """Return the number of leading layers that include one of each kind."""
    if model.pattern is not None:
        return max(model.pattern.index(kind) for kind in set(model.pattern)) + 1
    return 2 if model.experts and model.experts.dense_layers else 1


def _with_layers(model: Model, layers: int) -> Model:
    """Return the model with its first layers only; leading dense layers are reduced so that one MoE layer remains."""
    experts = model.experts
    if experts is not None:
        experts = replace(experts, dense_layers=min(experts.dense_layers, layers - 1))
    pattern = model.pattern[:layers] if model.pattern is not None else None
    return replace(model, layers=layers, pattern=pattern, experts=experts)


def describe_change(model: Model, changed: Model) -> str:
    """Describe how a proxy differs from the model."""
    words = [f"{changed.layers} of {model.layers} layers"]
    if changed.hidden != model.hidden:
        words.append(f"width {changed.hidden} of {model.hidden}")
    if model.experts and changed.experts and changed.experts.count != model.experts.count:
        words.append(f"{changed.experts.count} of {model.experts.count} experts")
    if changed.vocab != model.vocab:
        words.append(f"vocabulary {changed.vocab} of {model.vocab}")
    return ", ".join(words)
