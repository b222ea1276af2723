"""Work of one rank in an engine step: bytes of weights and cache, MACs per token, collectives, kernels.

Numbers only, independent of constants; `serving_step.py` gives them a time. Counts are those of all layers: with
pipeline parallelism a stage has 1/pp of them.
"""

import math
from dataclasses import dataclass

from llmb.config.model import Model
from llmb.perfmodel.block_costs import BlockCost, block_stack, indexer_weights
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.serving_time.serving_setup import ServingSetup

BF16 = BYTES["bf16"]
# Kernels of a block in a CUDA graph. attention: norm, qkv, RoPE, cache write, attention, output. mla: norms, down
# and up projections, RoPE, cache write, absorbed projections, attention and its combine, output. mlp: norm, two GEMMs,
# activation. experts: norm, router, top-k, sort, permute, two GEMMs, activation, combine; shared ones: two GEMMs,
# activation, add. mamba: norm, in, convolution, scan, gate, out. delta_net: norm, two in, convolution, gates,
# recurrence, gated norm, out.
KERNELS = {"attention": 6, "mla": 14, "mlp": 4, "experts": 9, "mamba": 6, "delta_net": 8}
# Of the native engine: one down projection of MLA, and one kernel of its norm, RoPE and cache write.
NATIVE_KERNELS = KERNELS | {"mla": 11}
SHARED_KERNELS = 4
INDEXER_KERNELS = 8  # two projections, norm, RoPE, cache write, quantization, scores, top-k
SKINNY_BLOCKS = ("attention", "mlp")  # of which the native engine fuses all but GEMMs and attention, for few tokens
QUANTIZED_GEMMS = {"attention": 2, "mla": 4, "mlp": 2, "experts": 2, "mamba": 2, "delta_net": 2}
INDEX_BYTES = 1 + 4 / 128  # per value of an indexer's key: fp8, with a scale for all of them
INDEX_COST = 0.5  # time of a MAC of an indexer, in fp8, against one of attention in bf16
# Kernels per quantized input: fp8 with static scales is fused with the norm or activation before it.
QUANTIZE = {"bf16": 0.0, "fp8": 0.5, "nvfp4": 1.0}


@dataclass(frozen=True, kw_only=True)
class ServingWork:
    """Counts of one rank over all layers."""

    low_bytes: float = 0.0  # weights in the run's dtype, read in every step
    low_macs: float = 0.0  # per token
    low_gemms: float = 0.0  # dense ones
    high_bytes: float = 0.0  # weights left in bf16
    high_macs: float = 0.0
    high_gemms: float = 0.0
    head_bytes: float = 0.0
    head_macs: float = 0.0  # per sampled token
    expert_bytes: float = 0.0  # of all local routed experts
    expert_macs: float = 0.0  # per token of all replicas
    routed: float = 0.0  # fraction of the experts that one token is routed to
    kv_bytes: float = 0.0  # per cached token, in layers that attend to all of them
    kv_macs: float = 0.0
    window_kv_bytes: float = 0.0  # the same in layers with a sliding window
    window_kv_macs: float = 0.0
    window: float = 0.0
    held_window: float = 0.0  # tokens of a request that windowed layers keep: sparse attention may need any of them
    state_bytes: float = 0.0  # recurrent state of a request, read and written
    pair_macs: float = 0.0  # of prefill, per (query, key) pair
    window_pair_macs: float = 0.0
    activation_bytes: float = 0.0  # of memory-bound kernels, per token
    reduces: float = 0.0  # all-reduces, or gathers and scatters of attention replicas
    direct_bytes: float = 0.0  # that a rank receives in one of them, per token, when all send to all
    ring_bytes: float = 0.0  # the same in a ring
    kernels: float = 0.0
    expert_kernels: float = 0.0  # of these, in blocks with experts
    fused_kernels: float = 0.0  # of these, in blocks that skinny GEMMs fuse

    @property
    def weight_bytes(self) -> float:
        return self.low_bytes + self.high_bytes + self.head_bytes + self.expert_bytes


def serving_work(setup: ServingSetup) -> ServingWork:
    """Return the counts of one rank."""
    model, bytes_low = setup.shape.model, BYTES[setup.dtype]
    total: dict[str, float] = {"head_macs": model.hidden * model.vocab / setup.tp, "window": setup.shape.window or 0}
    total["head_bytes"] = total["head_macs"] * BF16
    for kind, count, block in block_stack(model):
        for name, value in _block(setup, kind, block, bytes_low).items():
            total[name] = total.get(name, 0.0) + count * value
    total |= _collective_bytes(setup)
    if model.experts:
        total["routed"] = model.experts.top_k / model.experts.count
    if model.mla is not None and model.mla.index_topk:
        total |= {"window": model.mla.index_topk, "held_window": math.inf}
    else:
        _move_windowed(setup, total)
    return ServingWork(**total)


def _collective_bytes(setup: ServingSetup) -> dict[str, float]:
    """Return the bytes of one collective per token: an all-reduce, or a gather of all replicas' tokens."""
    size = setup.shape.model.hidden * BF16
    if setup.attention_dp > 1:
        ranks = setup.tp * setup.attention_dp
        return {"direct_bytes": size * (ranks - 1) / ranks, "ring_bytes": size * (ranks - 1) / ranks}
    return {"direct_bytes": size * (setup.tp - 1), "ring_bytes": 2 * size * (setup.tp - 1) / setup.tp}


def four_bit_experts_only(setup: ServingSetup) -> bool:
    """4-bit checkpoints of mixtures quantize the experts and leave attention in bf16."""
    return setup.dtype == "nvfp4" and setup.shape.model.experts is not None


def _block(setup: ServingSetup, kind: str, block: BlockCost, bytes_low: float) -> dict[str, float]:
    model, tp = setup.shape.model, setup.tp
    dense = _dense_on_rank(model, kind, block, tp)
    counts: dict[str, float] = {"high_macs": float(block.router_weights), "high_gemms": float(kind == "experts")}
    gemms = 0.0 if kind == "experts" and not dense else float(QUANTIZED_GEMMS[kind])
    if kind in ("attention", "mla") and four_bit_experts_only(setup):
        counts["high_macs"] += dense
        counts["high_gemms"] += gemms
    else:
        counts |= {"low_macs": dense, "low_bytes": dense * bytes_low, "low_gemms": gemms}
    counts["high_bytes"] = counts["high_macs"] * BF16
    if kind in ("attention", "mla"):
        value_bytes = BYTES[setup.kv_dtype]
        kv_values = block.kv_values if kind == "mla" else block.kv_values / min(tp, model.kv_heads)
        counts |= {
            "kv_bytes": kv_values * value_bytes,
            "kv_macs": block.decode_pair_macs / tp,
            "pair_macs": block.pair_macs / tp,
        }
    if block.selected_keys:
        counts |= _sparse_attention(setup, model, block)
    if block.state_values:
        counts["state_bytes"] = 2 * block.state_values * BYTES["fp32"] / tp
    if kind == "experts":
        ranks = setup.ep * setup.moe_tp
        counts |= {
            "expert_bytes": block.routed_weights / ranks * bytes_low,
            "expert_macs": block.active_routed_weights / ranks,
        }
    counts["activation_bytes"] = BF16 * (4 * model.hidden + _inner_values(setup, kind, block))
    plain = kind in ("attention", "mla") and four_bit_experts_only(setup)
    kernels = NATIVE_KERNELS if setup.engine == "native" else KERNELS
    counts["kernels"] = kernels[kind] + (0.0 if plain else QUANTIZED_GEMMS[kind] * QUANTIZE[setup.dtype])
    if block.selected_keys:
        counts["kernels"] += INDEXER_KERNELS
    if kind == "experts" and model.experts and model.experts.shared:
        counts["kernels"] += SHARED_KERNELS + QUANTIZE[setup.dtype]
    counts["fused_kernels"] = counts["kernels"] if kind in SKINNY_BLOCKS else 0.0
    counts["expert_kernels"] = counts["kernels"] if kind == "experts" else 0.0
    if kind == "experts" and setup.attention_dp > 1:
        counts["reduces"] = 2.0
    elif tp > 1:
        counts["reduces"] = 1.0
    return counts


def _sparse_attention(setup: ServingSetup, model: Model, block: BlockCost) -> dict[str, float]:
    """Return cache and MACs of sparse attention: the indexer, whole on every rank, scores all tokens in fp8.

    Keys are gathered token by token, so prompts attend like decodes, to the latents.
    """
    assert model.mla is not None
    latents = block.kv_values - model.mla.index_dim
    return {
        "kv_bytes": model.mla.index_dim * INDEX_BYTES,
        "kv_macs": block.index_macs * INDEX_COST,
        "pair_macs": block.index_macs * INDEX_COST,
        "window_kv_bytes": latents * BYTES[setup.kv_dtype],
        "window_kv_macs": block.decode_pair_macs / setup.tp,
        "window_pair_macs": block.decode_pair_macs / setup.tp,
    }


def _inner_values(setup: ServingSetup, kind: str, block: BlockCost) -> float:
    """Return the values that a block's memory-bound kernels read and write per token, on one rank.

    Permuted inputs and outputs of experts have the full width on every rank that holds some of their experts.
    """
    model, experts = setup.shape.model, setup.shape.model.experts
    if kind != "experts" or experts is None:
        return (block.saved_values - 2 * model.hidden) / setup.tp
    projections = 3 if model.gated else 2
    routed = experts.top_k * setup.attention_dp / setup.ep  # rows of this rank per token of its replica
    inner = projections * experts.ffn * (routed / setup.moe_tp + experts.shared / setup.tp)
    return 2 * model.hidden * routed + inner


def _dense_on_rank(model: Model, kind: str, block: BlockCost, tp: int) -> float:
    """Return the weights of a block on one rank; KV heads and MLA's down projections are replicated."""
    if kind == "attention":
        q_and_o = (2 + model.output_gate) * model.hidden * model.heads * model.head_dim
        return q_and_o / tp + (block.dense_weights - q_and_o) / min(tp, model.kv_heads)
    if kind == "mla":
        assert model.mla is not None
        down = model.hidden * (model.mla.q_rank + model.mla.kv_rank + model.mla.rope_dim) + indexer_weights(model)
        return down + (block.dense_weights - down) / tp
    return block.dense_weights / tp


def _move_windowed(setup: ServingSetup, total: dict[str, float]) -> None:
    """Count the cache and pairs of layers with a sliding window apart."""
    total["held_window"] = total["window"]
    layers = setup.shape.model.blocks.get("attention", 0) + setup.shape.model.blocks.get("mla", 0)
    part = setup.shape.window_layers / layers if layers and setup.shape.window else 0.0
    total["window_kv_bytes"] = part * total.get("kv_bytes", 0.0)
    total["window_pair_macs"] = part * total.get("pair_macs", 0.0)
    for name in ("kv_bytes", "kv_macs", "pair_macs"):
        total[name] = (1 - part) * total.get(name, 0.0)
