"""The least seconds that the classes of `train_trace.py` can take in a step: library times, and bytes over bandwidth.

Bytes are those of work fused as far as it can be, in bf16: a norm is read and written once, on its way back with the
slope that goes around it; an activation is read and written once each way; in fp8 a producer writes its two 8-bit
layouts instead of one of bf16, so that only weights, attention's output and its slopes need a pass of their own;
gradients and the stream add up in the products' own epilogues. Nothing is computed again.
"""

from train_calls import Attended, Call, Moved, Product, calls_of
from train_trace import (
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

from llmb.config.spec import Model, RunConfig, Training
from llmb.perfmodel import block_costs, params
from llmb.perfmodel.memory_estimate import memory_estimate

VALUE = params.BYTES["bf16"]


def floors(config: RunConfig, seconds: dict[Call, float], memory: float) -> dict[str, float]:
    """Seconds of each class that has a floor."""
    work = config.workload
    assert isinstance(work, Training)
    kinds = {Product: PRODUCTS, Attended: ATTENTION, Moved: SCAN}
    found: dict[str, float] = {}
    for call, count in calls_of(config).items():
        kind = kinds[type(call)]
        found[kind] = found.get(kind, 0.0) + work.ga * count * seconds[call]
    for kind, moved in _moved(config, work.gbs * work.seqlen).items():
        found[kind] = found.get(kind, 0.0) + moved / memory
    return found


def product_floor(size: Size, calls: int, seconds: dict[Call, float]) -> float | None:
    """Of products of one size: at the rate measured for it, else at the mean rate of the format."""
    if size.flops is None:
        return None
    alike = [(call, s) for call, s in seconds.items() if isinstance(call, Product) and call.dtype == size.dtype]
    same = [(call, s) for call, s in alike if call.sizes == size.sizes]
    if not alike:
        return None
    if same:
        return calls * min(s for _, s in same)
    return calls * size.flops * sum(s for _, s in alike) / sum(call.flops for call, _ in alike)


def _moved(config: RunConfig, tokens: int) -> dict[str, float]:
    """Bytes of a step, by class."""
    model = config.model
    norms = 1 + sum(model.blocks.values()) * (2 if model.post_norms else 1)
    small = 6.0 * norms * model.hidden  # values a token, there and back
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
    found = {
        SMALL: tokens * small * VALUE,
        LOSS: 2.0 * tokens * model.vocab * VALUE,
        OPTIMIZER: 2 * (held.weights + held.optimizer) + held.gradients,
        COPIES: 4.0 * tokens * model.hidden * VALUE,  # the embedding's rows, there and back
        ADDING: 0.0,
    }
    found |= {kind: tokens * values * VALUE for kind, values in ((ROUTING, routing), (SCAN, scan)) if values}
    if config.precision.dtype == "fp8":
        blocks = block_costs.block_stack(model)
        weights = sum(count * (block.dense_weights + block.routed_weights) for _, count, block in blocks)
        found[QUANTISING] = 2.0 * weights + 2 * tokens * attention * VALUE
    return found


def _small(model: Model, kind: str) -> float:
    """Values that norms inside, rotations and activations of a block move for a token, there and back."""
    if kind == "attention":
        return 4.0 * (model.heads + model.kv_heads) * model.head_dim if model.rope is not None else 0.0
    if kind == "mla" and model.mla is not None:
        latent = model.mla
        return 5.0 * (latent.q_rank + latent.kv_rank) + 4.0 * (model.heads + 1) * latent.rope_dim
    if kind == "mlp":
        return (8.0 if model.gated else 5.0) * model.ffn
    if kind == "experts" and model.experts is not None:
        return 8.0 * model.experts.ffn * (model.experts.top_k + model.experts.shared)
    if kind == "mamba" and model.mamba is not None:
        return 8.0 * model.mamba.heads * model.mamba.head_dim  # the gated norm
    return 0.0
