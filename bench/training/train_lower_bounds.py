"""Lower bounds of the classes of `train_trace.py` in a step: library times, and bytes over bandwidth.

Bytes assume perfect fusion in bf16: a norm is read and written once, in the backward pass with d_residual; an
activation is read and written once each way; in fp8 a producer writes two fp8 layouts instead of one of bf16, so that
only weights, attention's output and its gradients need a pass of their own; gradients and the residual are accumulated
in epilogues of GEMMs. Nothing is recomputed.
"""

from llmb.config.model import Model
from llmb.config.spec import RunConfig, Training
from llmb.perfmodel import block_costs, params
from llmb.perfmodel.memory_estimate import memory_estimate
from training.train_calls import AttentionCall, Call, GemmCall, MemoryCall, calls_of
from training.train_trace import (
    ADDING,
    ATTENTION,
    COPIES,
    LOSS,
    OPTIMIZER,
    PRODUCTS,
    QUANTISING,
    ROUTING,
    SCAN,
    SMALL,
    Size,
)

VALUE = params.BYTES["bf16"]


def lower_bounds(config: RunConfig, seconds: dict[Call, float], memory: float) -> dict[str, float]:
    """Return the lower bound of each class in seconds."""
    work = config.workload
    assert isinstance(work, Training)
    kinds = {GemmCall: PRODUCTS, AttentionCall: ATTENTION, MemoryCall: SCAN}
    bounds: dict[str, float] = {}
    for call, count in calls_of(config).items():
        kind = kinds[type(call)]
        bounds[kind] = bounds.get(kind, 0.0) + work.ga * count * seconds[call]
    for kind, moved in _moved(config, work.gbs * work.seqlen).items():
        bounds[kind] = bounds.get(kind, 0.0) + moved / memory
    return bounds


def gemm_lower_bound(size: Size, calls: int, seconds: dict[Call, float]) -> float | None:
    """Return the lower bound of GEMMs of one size: at its measured rate, else at the mean rate of the dtype."""
    if size.flops is None:
        return None
    alike = [(call, s) for call, s in seconds.items() if isinstance(call, GemmCall) and call.dtype == size.dtype]
    same = [(call, s) for call, s in alike if call.sizes == size.sizes]
    if not alike:
        return None
    if same:
        return calls * min(s for _, s in same)
    return calls * size.flops * sum(s for _, s in alike) / sum(call.flops for call, _ in alike)


def _moved(config: RunConfig, tokens: int) -> dict[str, float]:
    """Return the bytes of a step by class."""
    model = config.model
    norms = 1 + sum(model.blocks.values()) * (2 if model.post_norms else 1)
    small = 6.0 * norms * model.hidden  # values per token, forward and backward
    routing = scan = attention = 0.0
    for kind, count in model.blocks.items():
        small += count * _small(model, kind)
        if kind == "experts" and model.experts is not None:
            routing += count * 4 * (model.experts.top_k + 1) * model.hidden
        if kind == "mamba" and model.mamba is not None:  # the convolution; the scan itself is a call
            inner = model.mamba.heads * model.mamba.head_dim
            scan += count * 5 * (inner + 2 * model.mamba.groups * model.mamba.state)
        if kind == "attention":
            attention += count * 2 * (model.heads + model.kv_heads) * model.head_dim
    held = memory_estimate(config)
    bounds = {
        SMALL: tokens * small * VALUE,
        LOSS: 2.0 * tokens * model.vocab * VALUE,
        OPTIMIZER: 2 * (held.weights + held.optimizer) + held.gradients,
        COPIES: 4.0 * tokens * model.hidden * VALUE,  # rows of the embedding, forward and backward
        ADDING: 0.0,
    }
    bounds |= {kind: tokens * values * VALUE for kind, values in ((ROUTING, routing), (SCAN, scan)) if values}
    if config.precision.dtype == "fp8":
        blocks = block_costs.block_stack(model)
        weights = sum(count * (block.dense_weights + block.routed_weights) for _, count, block in blocks)
        bounds[QUANTISING] = 2.0 * weights + 2 * tokens * attention * VALUE
    return bounds


def _small(model: Model, kind: str) -> float:
    """Return the values that norms, RoPE and activations of a block move for a token, forward and backward."""
    if kind == "attention":
        return 4.0 * (model.heads + model.kv_heads) * model.head_dim if model.rope is not None else 0.0
    if kind == "mla" and model.mla is not None:
        mla = model.mla
        return 5.0 * (mla.q_rank + mla.kv_rank) + 4.0 * (model.heads + 1) * mla.rope_dim
    if kind == "mlp":
        return (8.0 if model.gated else 5.0) * model.ffn
    if kind == "experts" and model.experts is not None:
        return 8.0 * model.experts.ffn * (model.experts.top_k + model.experts.shared)
    if kind == "mamba" and model.mamba is not None:
        return 8.0 * model.mamba.heads * model.mamba.head_dim  # the gated norm
    return 0.0
