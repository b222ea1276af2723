"""What a workload needs: parameters, FLOPs, bytes; one function per kind of block.

Each block function returns a `Block`: its weights and its work per token, per (query, key) pair and per sequence. All
else is sums over the stack. Conventions, the same everywhere:
- one multiply-add (MAC) is 2 FLOPs; the backward pass costs twice the forward, so training is 6 FLOPs per forward MAC;
- every matrix weight a token meets counts, the LM head included; the embedding lookup, norms, softmax, RoPE,
  activation functions, biases, convolutions, routers and the optimizer do not;
- `full` counts every (query, key) pair of attention, `causal` half of them.

    python -c "from llmb import costs; help(costs)"
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from llmb.config.spec import Model, Precision
from llmb.errors import ConfigError, UnknownName

Convention = Literal["causal", "full"]

# Bytes a value. nvfp4: 4 bits and one 8-bit scale for every 16 values.
BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
FP8_MULTIPLE = 16  # products of 8-bit numbers take only sums over so many, or a multiple


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block needs. Counts of weights, of MACs and of values (whose bytes depend on the dtype)."""

    matrices: int = 0  # weights that every token is multiplied with: as many MACs a token
    routed: int = 0  # weights of all routed experts
    visited: int = 0  # those of them that one token is multiplied with: as many MACs a token
    router: int = 0  # weights that choose the experts
    vectors: int = 0  # inner norms, biases, convolution
    pair_macs: int = 0  # for each (query, key) pair
    repeated_pair_macs: int = 0  # q x k, which a fused attention backward computes a second time
    scan_macs: int = 0  # for each token, of a recurrence computed in chunks
    step_macs: int = 0  # for each token, of the same recurrence one token after the other
    decode_pair_macs: int = 0  # for each cached token when one token is generated
    kv_values: int = 0  # cached for each token
    kv_wide_values: int = 0  # of these, in bf16 or wider whatever the cache's dtype
    state_values: int = 0  # kept for each sequence, however long
    saved_values: int = 0  # kept for each token until the backward pass, the norm before the block included

    @property
    def parameters(self) -> int:
        return self.matrices + self.routed + self.router + self.vectors

    @property
    def token_macs(self) -> int:
        return self.matrices + self.visited


def attention(model: Model) -> Block:
    """Softmax attention with grouped keys and values.

    Matrices: q and o (hidden x heads * head_dim each), k and v (hidden x kv_heads * head_dim each). A pair costs
    head_dim MACs a head for q x k and as many for weights x v. Saved: the residual and its norm, q, k, v, the output.
    Leaves out softmax and RoPE; sliding windows are not known here.
    """
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return Block(
        matrices=2 * model.hidden * (width + kv_width),
        pair_macs=2 * width,
        repeated_pair_macs=width,
        decode_pair_macs=2 * width,
        kv_values=2 * kv_width,
        saved_values=2 * model.hidden + 2 * width + 2 * kv_width,
    )


def latent_attention(model: Model) -> Block:
    """Multi-head latent attention (MLA): queries, keys and values through low-rank latents.

    Matrices: down to q_rank and up to heads * (nope + rope); down to kv_rank + rope and up to heads * (nope + value);
    output from heads * value. Norms on both latents. Over a whole sequence keys and values are expanded, so a pair
    costs nope + rope + value MACs a head. Only the kv latent and the shared rope key are cached; generating a token
    keeps them unexpanded (the up-projection is absorbed into query and output at the same MACs as applying it to
    that token), so a cached token costs kv_rank + rope for the score and kv_rank for the value, a head.
    """
    if model.latent is None:
        raise ConfigError(f"model {model.name}: latent attention needs the field latent")
    latent, heads = model.latent, model.heads
    key, value = latent.nope_dim + latent.rope_dim, latent.value_dim
    down = model.hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim)
    up = latent.q_rank * heads * key + latent.kv_rank * heads * (latent.nope_dim + value)
    return Block(
        matrices=down + up + heads * value * model.hidden,
        vectors=latent.q_rank + latent.kv_rank,
        pair_macs=heads * (key + value),
        repeated_pair_macs=heads * key,
        decode_pair_macs=heads * (2 * latent.kv_rank + latent.rope_dim),
        kv_values=latent.kv_rank + latent.rope_dim,
        kv_wide_values=latent.rope_dim,  # a rotated key that all heads share
        saved_values=2 * (model.hidden + latent.q_rank + latent.kv_rank) + heads * 2 * (key + value),
    )


def mlp(model: Model) -> Block:
    """The dense MLP: gate, up and down when gated, otherwise up and down. Leaves out the activation function."""
    products = 3 if model.gated else 2
    return Block(
        matrices=products * model.hidden * model.ffn,
        saved_values=2 * model.hidden + products * model.ffn,
    )


def experts(model: Model) -> Block:
    """A mixture of gated MLPs: a token visits top_k of `count` and all shared ones.

    The router's weights (hidden x count, and a correction bias of `count` with sigmoid scores) are parameters but no
    model FLOPs: the published formulas leave them out. That is 0.004 % of Grok-1 and 0.3 % of DeepSeek-V3. Also left
    out: dispatch, combination, load imbalance and dropped tokens. Saved: also each visiting copy of the token, before
    and after its expert.
    """
    if model.experts is None:
        raise ConfigError(f"model {model.name}: an expert block needs the field experts")
    moe = model.experts
    one = 3 * model.hidden * moe.ffn
    return Block(
        matrices=moe.shared * one,
        routed=moe.count * one,
        visited=moe.top_k * one,
        router=model.hidden * moe.count + (moe.count if moe.score == "sigmoid" else 0),
        saved_values=2 * model.hidden * (1 + moe.top_k) + 3 * moe.ffn * (moe.top_k + moe.shared),
    )


def mamba(model: Model) -> Block:
    """A Mamba-2 mixer of inner width i = heads * head_dim, state n, groups g, chunks of c tokens.

    Matrices: in (hidden x (2i + 2gn + heads): z, x, B, C, dt) and out (i x hidden). The scan in chunks costs a token
    c * i MACs within its chunk, 2 * n * i to write and read the chunk states, and c * n * g for C x B. Both conventions
    count a chunk whole, as its kernel computes it. One token at a time costs n * i to update the state and n * i to
    read it. Vectors: A_log, D and dt_bias a head, the convolution with its bias over i + 2gn channels, the gated norm.
    Leaves out the convolution's MACs (less than 0.02 % of the block at the sizes in use), decay factors and gates.
    """
    if model.mamba is None:
        raise ConfigError(f"model {model.name}: a pattern with M needs the field mamba")
    m = model.mamba
    if m.chunk < 1:
        raise ConfigError(f"model {model.name}: mamba.chunk must be 1 or more, got {m.chunk}")
    inner, both = m.heads * m.head_dim, 2 * m.groups * m.state
    return Block(
        matrices=model.hidden * (3 * inner + both + m.heads),
        vectors=3 * m.heads + (m.conv + 1) * (inner + both) + inner,
        scan_macs=m.chunk * inner + 2 * m.state * inner + m.chunk * m.state * m.groups,
        step_macs=2 * m.state * inner,
        state_values=inner * m.state + (m.conv - 1) * (inner + both),
        saved_values=2 * model.hidden + 5 * inner + 2 * both + m.heads + 2 * inner * m.state // m.chunk,
    )


BLOCKS: dict[str, Callable[[Model], Block]] = {
    "attention": attention,
    "latent_attention": latent_attention,
    "mlp": mlp,
    "experts": experts,
    "mamba": mamba,
}


def stack(model: Model) -> list[tuple[str, int, Block]]:
    """Every kind of block the model holds: its name, how many, and what one needs."""
    if model.layers < 1:
        raise ConfigError(f"model {model.name}: layers must be 1 or more, got {model.layers}")
    if model.pattern is not None and sum(model.blocks.values()) != model.layers:
        raise ConfigError(
            f"model {model.name}: the pattern must be {model.layers} letters of M, * and -, got {model.pattern!r}"
        )
    return [(kind, count, BLOCKS[kind](model)) for kind, count in model.blocks.items() if count]


# Parameters


def parameter_breakdown(model: Model) -> dict[str, int]:
    """Parameters by part. A norm stands before every block, with `post_norms` one behind, and one before the head."""
    parts = {"embedding": model.vocab * model.hidden}
    norms, router, norms_of_block = 1, 0, 2 if model.post_norms else 1
    for kind, count, block in stack(model):
        parts[kind] = count * (block.parameters - block.router)
        norms, router = norms + count * norms_of_block, router + count * block.router
    if router:
        parts["router"] = router
    parts["norms"] = norms * model.hidden
    if not model.tied_embeddings:
        parts["lm_head"] = model.vocab * model.hidden
    return parts


def parameters(model: Model) -> int:
    """All parameters, tied embeddings once. Leaves out multi-token-prediction layers."""
    return sum(parameter_breakdown(model).values())


def active_parameters(model: Model) -> int:
    """Parameters one token meets: all but the routed experts it does not visit."""
    return parameters(model) - sum(count * (block.routed - block.visited) for _, count, block in stack(model))


# FLOPs of training


def forward_macs(model: Model, seqlen: int, convention: Convention) -> dict[str, float]:
    """MACs of one sequence going forward, by part."""
    pairs = _pairs(seqlen, convention)
    macs: dict[str, float] = {
        kind: count * (seqlen * (block.token_macs + block.scan_macs) + pairs * block.pair_macs)
        for kind, count, block in stack(model)
    }
    return macs | {"lm_head": seqlen * model.hidden * model.vocab}


def forward_flops_per_sequence(model: Model, seqlen: int, convention: Convention) -> float:
    """Forward only, with the LM head on every token, as in training: 2 FLOPs a MAC."""
    return 2.0 * sum(forward_macs(model, seqlen, convention).values())


def flops_breakdown(model: Model, seqlen: int, convention: Convention) -> dict[str, float]:
    """Training FLOPs of one sequence by part: 6 a MAC. The parts sum to `train_flops_per_sequence`."""
    return {part: 6.0 * macs for part, macs in forward_macs(model, seqlen, convention).items()}


def train_flops_per_sequence(model: Model, seqlen: int, convention: Convention) -> float:
    """Model FLOPs of forward and backward of one sequence, nothing recomputed.

    Published constants in GFLOP/token at 8,192 tokens, `causal`, beside ours: Llama 3.1 405b 2524 (2523.96), 70b 449
    (449.22), 8b 51.5 (51.47). They differ by the rounding of the printed figure only. DeepSeek-V3 at 4,096 tokens
    without its prediction layer: 249.7 (249.81), the remaining 0.04 % unexplained; with the router it would be 250.45.
    """
    return sum(flops_breakdown(model, seqlen, convention).values())


def train_flops_per_token(model: Model, seqlen: int, convention: Convention) -> float:
    """Model FLOPs a token of a sequence of this length, on average over its positions."""
    return train_flops_per_sequence(model, seqlen, convention) / seqlen


def hardware_flops_per_sequence(model: Model, seqlen: int, convention: Convention, recompute_layers: int) -> float:
    """FLOPs the device executes for one sequence, for HFU: model FLOPs and what is computed twice.

    Twice: the forward of `recompute_layers` layers (of the model in all, each taken as the average layer), and q x k of
    every attention block, which a fused attention backward repeats instead of storing the scores.
    """
    if not 0 <= recompute_layers <= model.layers:
        raise ConfigError(f"recompute_layers must be 0 to {model.layers} for {model.name}, got {recompute_layers}")
    pairs = _pairs(seqlen, convention)
    macs = forward_macs(model, seqlen, convention)
    layers = sum(macs.values()) - macs["lm_head"]
    scores = pairs * sum(count * block.repeated_pair_macs for _, count, block in stack(model))
    return 6.0 * sum(macs.values()) + 2.0 * (layers * recompute_layers / model.layers + scores)


def _pairs(seqlen: int, convention: Convention) -> float:
    """(query, key) pairs counted in one sequence."""
    _check_tokens("seqlen", seqlen)
    if convention not in ("causal", "full"):
        raise UnknownName("FLOPs convention", convention, ("causal", "full"))
    return seqlen * seqlen if convention == "full" else seqlen * seqlen / 2


def _check_tokens(name: str, tokens: int) -> None:
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"{name} must be a whole number of tokens, 1 or more, got {tokens!r}")


# FLOPs and bytes of inference


def prefill_flops(model: Model, isl: int, convention: Convention) -> float:
    """Reading a prompt of `isl` tokens; the LM head only on the last one, since no other logits are wanted."""
    macs = forward_macs(model, isl, convention)
    return 2.0 * (sum(macs.values()) - macs["lm_head"] + model.hidden * model.vocab)


def decode_flops(model: Model, context: int) -> float:
    """Generating one token that attends to `context` tokens, itself included. No convention: each pair is real."""
    _check_tokens("context", context)
    macs = model.hidden * model.vocab
    for _, count, block in stack(model):
        macs += count * (block.token_macs + block.step_macs + context * block.decode_pair_macs)
    return 2.0 * macs


def kv_bytes_per_token(model: Model, kv_dtype: str | None) -> float:
    """Cache of one token over all layers; no dtype means bf16. A Mamba block caches nothing that grows."""
    each = bytes_of(kv_dtype or "bf16")
    wide = max(each, BYTES["bf16"])
    blocks = [(count, block.kv_values, block.kv_wide_values) for _, count, block in stack(model)]
    return sum(count * ((values - wider) * each + wider * wide) for count, values, wider in blocks)


def state_bytes_per_sequence(model: Model) -> float:
    """What recurrent blocks keep for a sequence of any length, in fp32. Zero for a model without them."""
    return sum(count * block.state_values for _, count, block in stack(model)) * BYTES["fp32"]


def decode_bytes(model: Model, precision: Precision, batch: int, context: int) -> float:
    """Bytes that generating one token for each of `batch` requests must move, for MBU.

    Block weights once in the run's dtype, the LM head once in bf16 or wider, `context` cached tokens a request,
    recurrent states read and written. Of the routed experts those that some token visits, on average, if all are
    equally likely: count * (1 - (1 - top_k / count) ** batch). Leaves out activations, norms and the embedding's rows.
    """
    _check_tokens("batch", batch)
    _check_tokens("context", context)
    per_weight = bytes_of(precision.dtype)
    total = model.hidden * model.vocab * max(per_weight, BYTES["bf16"])
    for _, count, block in stack(model):
        touched = block.routed * (1 - (1 - block.visited / block.routed) ** batch) if block.routed else 0.0
        total += count * (block.matrices + touched) * per_weight
    per_request = context * kv_bytes_per_token(model, precision.kv_dtype) + 2 * state_bytes_per_sequence(model)
    return total + batch * per_request


def bytes_of(dtype: str) -> float:
    if dtype not in BYTES:
        raise UnknownName("dtype", dtype, BYTES)
    return BYTES[dtype]


def odd_fp8_widths(model: Model) -> dict[str, int]:
    """Widths of a plain block that 8-bit products cannot sum over, each of which they would have to, by name."""
    widths = {
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads * head_dim": model.heads * model.head_dim,
        "kv_heads * head_dim": model.kv_heads * model.head_dim,
    }
    return {name: width for name, width in widths.items() if width % FP8_MULTIPLE}
