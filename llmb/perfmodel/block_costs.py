"""Weights, work and cache of each kind of block, as counts: the single source of all parameter, FLOP and byte counts.

    BLOCK_COSTS["attention"](model).dense_weights       weights of one block, multiplied with every token
    block_stack(model)                                  every kind of block of the model, with its count

Each function returns a `BlockCost`: weights, and MACs per token, per (query, key) pair and per sequence. One
multiply-add (MAC) is 2 FLOPs. Norms, softmax, RoPE, activation functions, biases and convolutions are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llmb.config.model import Model
from llmb.errors import ConfigError

DELTA_CHUNK = 64  # tokens that kernels of the gated delta rule compute at once


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Counts of weights, MACs and values (whose bytes depend on the dtype) of one block."""

    dense_weights: int = 0  # multiplied with every token: as many MACs per token
    routed_weights: int = 0  # of all routed experts
    active_routed_weights: int = 0  # of the experts that one token is routed to: as many MACs per token
    routed_biases: int = 0  # of all routed experts
    router_weights: int = 0
    vector_weights: int = 0  # inner norms, biases, convolution
    pair_macs: int = 0  # per (query, key) pair
    index_macs: int = 0  # per (query, key) pair of sparse attention, to choose the keys that a query attends to
    selected_keys: int = 0  # keys that a query of sparse attention attends to at most; 0: all
    recomputed_pair_macs: int = 0  # q x k, which a fused attention backward recomputes
    scan_macs: int = 0  # per token, of a recurrence computed in chunks
    step_macs: int = 0  # per token, of the same recurrence one token at a time (decode)
    decode_pair_macs: int = 0  # per cached token when one token is generated
    kv_values: int = 0  # cached per token
    kv_bf16_values: int = 0  # of these, in bf16 or wider whatever the dtype of the cache
    state_values: int = 0  # of the recurrent state, per sequence
    saved_values: int = 0  # activations saved per token for backward, including those of the norm before the block

    @property
    def parameters(self) -> int:
        matrices = self.dense_weights + self.routed_weights + self.router_weights
        return matrices + self.routed_biases + self.vector_weights

    @property
    def token_macs(self) -> int:
        return self.dense_weights + self.active_routed_weights


def attention(model: Model) -> BlockCost:
    """Softmax attention with grouped-query KV heads (GQA).

    Weights: q and o (hidden x heads * head_dim each), k and v (hidden x kv_heads * head_dim each), and a gate of the
    output as wide as q if there is one. A pair costs head_dim MACs per head for q x k and as many for p x v. Saved: the
    residual and its norm, q, k, v, the output; with a gate also it and the gated output. Leaves out softmax and RoPE. A
    sliding window limits the pairs, not their cost: see `flops.py`.
    """
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = {None: 0, "head": 2 * model.head_dim, "projection": width + kv_width}[model.qk_norm]
    biases = (width + 2 * kv_width) * model.qkv_bias + model.hidden * model.o_bias
    sinks = model.heads * model.attention_sinks
    return BlockCost(
        dense_weights=2 * model.hidden * (width + kv_width) + model.hidden * width * model.output_gate,
        vector_weights=norms + biases + sinks,
        pair_macs=2 * width,
        recomputed_pair_macs=width,
        decode_pair_macs=2 * width,
        kv_values=2 * kv_width,
        saved_values=2 * model.hidden + 2 * width * (1 + model.output_gate) + 2 * kv_width,
    )


def mla(model: Model) -> BlockCost:
    """Multi-head latent attention (MLA): queries, keys and values through low-rank latents.

    Weights: down to q_rank and up to heads * (nope + rope), at once where there is no q_rank; down to kv_rank + rope
    and up to heads * (nope + value); output from heads * value. Norms on both latents. Over a whole sequence keys and
    values are expanded, so a pair costs nope + rope + value MACs per head. Only the KV latent and the shared RoPE key
    are cached; decode does not expand them (the up-projection is absorbed into query and output at the same MACs as
    applying it to that token), so a cached token costs kv_rank + rope MACs per head for the score and kv_rank for the
    value. The indexer of sparse attention has queries from the q latent, one key for all its heads, cached too, and a
    weight per head; a pair costs index_dim MACs per head.
    """
    if model.mla is None:
        raise ConfigError(f"model {model.name}: MLA needs the field mla")
    ranks, heads = model.mla, model.heads
    key, value = ranks.nope_dim + ranks.rope_dim, ranks.value_dim
    down = model.hidden * (ranks.q_rank + ranks.kv_rank + ranks.rope_dim)
    up = (ranks.q_rank or model.hidden) * heads * key + ranks.kv_rank * heads * (ranks.nope_dim + value)
    indexer = indexer_weights(model)
    return BlockCost(
        dense_weights=down + up + indexer + heads * value * model.hidden,
        vector_weights=ranks.q_rank + ranks.kv_rank + 2 * ranks.index_dim,
        index_macs=ranks.index_heads * ranks.index_dim,
        selected_keys=ranks.index_topk,
        pair_macs=heads * (key + value),
        recomputed_pair_macs=heads * key,
        decode_pair_macs=heads * (2 * ranks.kv_rank + ranks.rope_dim),
        kv_values=ranks.kv_rank + ranks.rope_dim + ranks.index_dim,
        kv_bf16_values=ranks.rope_dim,  # the RoPE key that all heads share
        saved_values=2 * (model.hidden + ranks.q_rank + ranks.kv_rank) + heads * 2 * (key + value),
    )


def indexer_weights(model: Model) -> int:
    """Return the weights of an indexer: its queries, its key and the weights of its heads."""
    assert model.mla is not None
    ranks = model.mla
    return ranks.q_rank * ranks.index_heads * ranks.index_dim + model.hidden * (ranks.index_dim + ranks.index_heads)


def mlp(model: Model) -> BlockCost:
    """Dense MLP: gate, up and down when gated, otherwise up and down. Leaves out the activation function."""
    projections = 3 if model.gated else 2
    return BlockCost(
        dense_weights=projections * model.hidden * model.ffn,
        saved_values=2 * model.hidden + projections * model.ffn,
    )


def moe(model: Model) -> BlockCost:
    """Mixture of gated MLPs: each token is routed to top_k of `count` experts and to all shared ones.

    The router (hidden x count, and `count` biases if it has any) counts as parameters but not as model FLOPs: the
    published formulas leave it out. That is 0.004 % of Grok-1 and 0.3 % of DeepSeek-V3. Also left out: dispatch,
    combine, load imbalance and dropped tokens. Saved: also each token-expert pair, before and after the
    expert. With `latent`, routed experts work at that width, and every token is projected to it and back.
    """
    if model.experts is None:
        raise ConfigError(f"model {model.name}: an expert block needs the field experts")
    experts = model.experts
    projections = 3 if model.gated else 2
    width = experts.latent or model.hidden
    expert_weights = projections * width * experts.ffn
    biases = experts.count * ((projections - 1) * experts.ffn + width) if experts.bias else 0
    latent_weights = 2 * model.hidden * experts.latent if experts.latent else 0
    return BlockCost(
        dense_weights=experts.shared * projections * model.hidden * experts.ffn + latent_weights,
        routed_weights=experts.count * expert_weights,
        active_routed_weights=experts.top_k * expert_weights,
        router_weights=(model.hidden + experts.has_correction_bias + experts.bias) * experts.count,
        routed_biases=biases,
        saved_values=2 * (model.hidden + width * experts.top_k)
        + projections * experts.ffn * (experts.top_k + experts.shared),
    )


def mamba(model: Model) -> BlockCost:
    """Mamba-2 mixer of inner width i = heads * head_dim, state n, groups g, chunks of c tokens.

    Weights: in (hidden x (2i + 2gn + heads): z, x, B, C, dt) and out (i x hidden). The chunked scan (SSD) costs
    c * i MACs per token within its chunk, 2 * n * i to write and read the chunk states, and c * n * g for C x B. Both
    conventions count a chunk in full, as its kernel computes it. Decode costs n * i to update the state and n * i to
    read it. Vectors: A_log, D and dt_bias per head, the convolution with its bias over i + 2gn channels, the gated
    norm. Leaves out the convolution's MACs (less than 0.02 % of the block at common sizes), decay factors and gates.
    """
    if model.mamba is None:
        raise ConfigError(f"model {model.name}: a pattern with M needs the field mamba")
    m = model.mamba
    if m.chunk < 1:
        raise ConfigError(f"model {model.name}: mamba.chunk must be 1 or more, got {m.chunk}")
    inner, b_and_c = m.heads * m.head_dim, 2 * m.groups * m.state
    return BlockCost(
        dense_weights=model.hidden * (3 * inner + b_and_c + m.heads),
        vector_weights=3 * m.heads + (m.conv + 1) * (inner + b_and_c) + inner,
        scan_macs=m.chunk * inner + 2 * m.state * inner + m.chunk * m.state * m.groups,
        step_macs=2 * m.state * inner,
        state_values=inner * m.state + (m.conv - 1) * (inner + b_and_c),
        saved_values=2 * model.hidden + 5 * inner + 2 * b_and_c + m.heads + 2 * inner * m.state // m.chunk,
    )


def delta_net(model: Model) -> BlockCost:
    """Gated DeltaNet mixer of keys k = key_heads * key_dim, values v = value_heads * value_dim, in chunks of c tokens.

    Weights: q and k, v and the output gate (hidden x (2k + 2v)), decay and write strength per value head, out (v x
    hidden). With a gate rank r the output gate and a decay per key channel go through r values instead. The chunked
    delta rule costs per token and value head c * (3 key_dim + 2 value_dim) within its chunk (k x k, the two products
    with its inverted triangle, q x k, scores x values) and 3 key_dim * value_dim to read the state with k and with q
    and to update it; decode costs the latter. A chunk is counted in full, and its inversion is left out (c^2 / 2 per
    head). Vectors: the convolution over q, k and v, decay and its bias, the norm of a head. Saved: projections before
    and after the convolution, the inverted triangles, the output before and after its gated norm.
    """
    if model.delta_net is None:
        raise ConfigError(f"model {model.name}: an attention pattern with D needs the field delta_net")
    d, c = model.delta_net, DELTA_CHUNK
    keys, values, heads = d.key_heads * d.key_dim, d.value_heads * d.value_dim, d.value_heads
    state, gates = heads * d.key_dim * d.value_dim, values + heads
    gate_weights, decays = model.hidden * gates, heads
    if d.gate_rank:
        gate_weights, decays = d.gate_rank * (2 * model.hidden + keys + values), keys
    return BlockCost(
        dense_weights=model.hidden * (2 * keys + values + heads) + gate_weights + values * model.hidden,
        vector_weights=d.conv * (2 * keys + values) + heads + decays + d.value_dim,
        scan_macs=heads * c * (3 * d.key_dim + 2 * d.value_dim) + 3 * state,
        step_macs=3 * state,
        state_values=state + (d.conv - 1) * (2 * keys + values),
        saved_values=2 * model.hidden + 2 * (2 * keys + values) + heads * (c + 1) + gates + 2 * values,
    )


# Kinds of blocks, named as in `Model.blocks`.
BLOCK_COSTS: dict[str, Callable[[Model], BlockCost]] = {
    "attention": attention,
    "mla": mla,
    "mlp": mlp,
    "experts": moe,
    "mamba": mamba,
    "delta_net": delta_net,
}


def layer_window(model: Model, layer: int) -> int | None:
    """Return the sliding window of a layer, in tokens; none: its attention is full."""
    return model.window if model.attention_kind(layer) == "S" else None


def attended_tokens(model: Model, context: float) -> float:
    """Return how many of `context` tokens the last one attends to, on average over layers."""
    return sum(min(context, layer_window(model, layer) or context) for layer in range(model.layers)) / model.layers


def block_stack(model: Model) -> list[tuple[str, int, BlockCost]]:
    """Return every kind of block of the model: its name, its count, and the cost of one."""
    if model.layers < 1:
        raise ConfigError(f"model {model.name}: layers must be 1 or more, got {model.layers}")
    if model.pattern is not None and sum(model.blocks.values()) != model.layers:
        raise ConfigError(
            f"model {model.name}: the pattern must be {model.layers} letters of M, *, - and E, got {model.pattern!r}"
        )
    return [(kind, count, BLOCK_COSTS[kind](model)) for kind, count in model.blocks.items() if count]
