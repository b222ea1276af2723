"""Limits of serving: FLOPs of prompts and outputs against GEMM rates, weights and KV cache against HBM bandwidth.

    serving_limits(setup, ServedFigures(output_tokens_per_s=9446))      -> compute, bandwidth

Both are lower bounds of the work: mixed steps may overlap them, so each must hold by itself.
"""

from dataclasses import dataclass, replace

from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.chip_limits import Ceiling, Limit, bandwidth_ceiling, compute_limit
from llmb.perfmodel.hardware import GB, GIB, gpu
from llmb.perfmodel.serving_time.cache_slots import request_bytes, resident_bytes
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import ServingWork, serving_work

MS = 1e3
MEMORY = "memory"
L2_BYTES = 128 * 2**20  # the largest L2 cache of the GPUs in the table: B200, 126 MB


@dataclass(frozen=True, kw_only=True)
class ServedFigures:
    """Measured figures of a serving run, all GPUs together. Null: not known."""

    output_tokens_per_s: float
    latency_ms: tuple[float, float] | None = None  # mean TTFT and TPOT at the setup's concurrency
    prefix_hit_rate: float = 0.0  # of prompt tokens, that need no prefill


def serving_limits(setup: ServingSetup, figures: ServedFigures) -> list[Limit]:
    """Return the limits of one GPU; none where its peaks are not known."""
    limits = [
        _memory(setup), _compute(setup, figures), _first_token(setup, figures), _bandwidth(setup, figures),
        _decode_bandwidth(setup, figures),
    ]  # fmt: skip
    return [limit for limit in limits if limit is not None]


def _memory(setup: ServingSetup) -> Limit | None:
    """Limit of memory, where the weights of a rank and the cache of one request exceed that of its GPU."""
    capacity = gpu(setup.gpu).memory_bytes or setup.gpu_memory_bytes
    work = serving_work(setup)
    needed = resident_bytes(setup, work) + request_bytes(setup, work)
    if capacity is None or needed <= capacity:
        return None
    return Limit(name=MEMORY, needed=needed / GIB, limit=capacity / GIB, unit="GiB/GPU", basis="memory of the GPU")


def _compute(setup: ServingSetup, figures: ServedFigures) -> Limit | None:
    """Limit of prefill and decode: every token passes all GEMMs of the layers, every output token the LM head."""
    osl = setup.osl * setup.length_ratio
    low, bf16 = _request_flops(setup, osl, figures.prefix_hit_rate)
    requests = figures.output_tokens_per_s / osl / setup.gpus
    return compute_limit(low, bf16, requests, setup.gpu, setup.dtype)


def _first_token(setup: ServingSetup, figures: ServedFigures) -> Limit | None:
    """Limit of TTFT: all GPUs of the engine compute the request's own prompt before its first token."""
    if figures.latency_ms is None:
        return None
    low, bf16 = _request_flops(setup, 1.0, figures.prefix_hit_rate)
    limit = compute_limit(low, bf16, MS / figures.latency_ms[0] / setup.gpus, setup.gpu, setup.dtype, is_short=True)
    return None if limit is None else replace(limit, name="compute of a prompt before its first token")


def _request_flops(setup: ServingSetup, osl: float, prefix_hit_rate: float) -> tuple[float, float]:
    """Return the FLOPs of a request: of GEMMs of layers, and of attention and the LM head, in bf16."""
    model, isl = setup.shape.model, setup.isl * setup.length_ratio
    prompt = isl * (1 - prefix_hit_rate)
    token = score = decode_score = 0.0
    for _, count, block in block_stack(model):
        token += count * block.token_macs
        score += count * block.pair_macs
        decode_score += count * block.decode_pair_macs
    selected = model.mla.index_topk if model.mla else 0
    window = min(1.0, (setup.shape.window or selected or isl) / isl) if setup.shape.window_layers or selected else 1.0
    low = 2.0 * token * (prompt + osl - 1)
    attention = window * (score * prompt * (isl - prompt / 2) + decode_score * (osl - 1) * (isl + osl / 2))
    return low, 2.0 * (model.hidden * model.vocab * osl + attention)


def _bandwidth(setup: ServingSetup, figures: ServedFigures) -> Limit | None:
    """Limit of decode steps: the KV cache for every token, the weights once for all requests that run at once."""
    ceiling = bandwidth_ceiling(setup.gpu)
    if ceiling is None:
        return None
    work, replicas = serving_work(setup), setup.attention_dp
    tokens = figures.output_tokens_per_s / replicas
    batch = max(1.0, min(setup.concurrency, setup.max_batch_size * replicas) / replicas)
    context = (setup.isl + setup.osl / 2) * setup.length_ratio
    cache = context * work.kv_bytes + min(context, work.window) * work.window_kv_bytes
    needed = tokens / setup.emitted * (cache + _step_weights(work) / batch) / setup.pp
    return _hbm("HBM bandwidth", needed, ceiling)


def _decode_bandwidth(setup: ServingSetup, figures: ServedFigures) -> Limit | None:
    """Limit of the time per output token: a decode step reads the weights, and the caches of all that decode."""
    ceiling = bandwidth_ceiling(setup.gpu)
    if ceiling is None or figures.latency_ms is None:
        return None
    ttft_ms, tpot_ms = figures.latency_ms
    e2e_s = (ttft_ms + (setup.osl - 1) * tpot_ms) / MS
    needed = _decode_bytes(setup, serving_work(setup), e2e_s, tpot_ms) / (tpot_ms * setup.emitted / MS)
    return _hbm("HBM bandwidth of a decode step", needed, ceiling)


def _hbm(name: str, needed: float, ceiling: Ceiling) -> Limit:
    return Limit(name=name, needed=needed / GB, limit=ceiling.rate / GB, unit="GB/s/GPU", basis=ceiling.basis)


def _decode_bytes(setup: ServingSetup, work: ServingWork, e2e_s: float, tpot_ms: float) -> float:
    """Return the bytes that a rank reads in a decode step at the least: one token's experts, the running KV caches."""
    decoding = min(1.0, (setup.osl - 1) * tpot_ms / MS / e2e_s)
    cached = setup.concurrency / setup.attention_dp * decoding * setup.isl * setup.length_ratio * work.kv_bytes
    return _step_weights(work) + cached / setup.pp


def _step_weights(work: ServingWork) -> float:
    """Return the weights that a rank reads from HBM in a step at the least: of experts, those of one token.

    A part may still lie in the L2 cache.
    """
    weights = work.low_bytes + work.high_bytes + work.head_bytes + work.expert_bytes * work.routed
    return max(0.0, weights - L2_BYTES)
