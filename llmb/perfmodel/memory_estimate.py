"""What a run occupies, before it is run: weights, gradients, optimizer, activations and cache, on GPU and host.

    memory_estimate(config).total / 2**30        GiB on the fullest GPU

An estimate, whose assumptions travel with it. Weights and FLOPs come from costs.py.
"""

import math
from dataclasses import dataclass, field

from llmb.config.spec import Inference, Model, OutOfCore, Parallel, Prediction, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel import serving_capacity
from llmb.perfmodel.flops import BYTES, bytes_of, parameter_breakdown, parameters, stack
from llmb.perfmodel.hardware import GIB, gpu
from llmb.perfmodel.shards import gradient_bytes
from llmb.perfmodel.training_memory import occupancy, offloaded

# Training state, bytes a parameter: weights, gradients, optimizer. Adam has two moments; a master copy is fp32.
FP32_STATE = (4.0, 4.0, 8.0)  # the weights are the master copy
MIXED_STATE = (2.0, 2.0, 12.0)  # the optimizer keeps the master copy: other engines
BF16_STATE = (2.0, 2.0, 4.0)  # no master copy, moments in bf16: out of core
LOSS_PIECE_TOKENS = 2048  # the loss is computed in pieces, so that the logits never exist whole
LOGIT_BYTES = 6.0  # bf16 logits and their fp32 softmax


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """An estimate, not a measurement: bytes on the fullest GPU, under the stated assumptions.

    Leaves out the CUDA context, communication buffers, kernel workspaces and fragmentation.
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    total: float = field(init=False)  # of the above; a field, so that the estimate as plain data has it too
    host: float = 0.0  # in the memory of the host, for this GPU
    device_budget: float | None = None  # what the GPU has, or may use; null when unknown
    host_budget: float | None = None  # what the host may use; null when not limited
    assumptions: str

    def __post_init__(self) -> None:
        total = self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache
        object.__setattr__(self, "total", total)

    @property
    def fits(self) -> bool | None:
        """Whether the estimate is within the budgets; null when the GPU's memory is unknown."""
        if self.device_budget is None:
            return None
        return self.total <= self.device_budget and (self.host_budget is None or self.host <= self.host_budget)


def memory_estimate(config: RunConfig) -> MemoryEstimate:
    """What the run will occupy on one GPU and on its host, before it is run."""
    for degree in ("dp", "tp", "pp", "cp", "ep", "etp"):
        if getattr(config.parallel, degree) < 1:
            raise ConfigError(f"{degree} must be 1 or more, got {getattr(config.parallel, degree)}")
    match config.workload:
        case Training() as work:
            return _training_memory(config, work)
        case Inference():
            return _inference_memory(config)
        case OutOfCore() as work:
            return _out_of_core_memory(config, work)


def _training_memory(config: RunConfig, work: Training) -> MemoryEstimate:
    if config.engine == "native":
        return _native_training_memory(config, work)
    return _foreign_training_memory(config, work)


def _native_training_memory(config: RunConfig, work: Training) -> MemoryEstimate:
    """Our engine, of which every tensor is known."""
    return MemoryEstimate(
        **occupancy(config),
        host=offloaded(config),
        device_budget=gpu(config.machine.gpu).memory_bytes,
        assumptions=(
            f"estimate: weights of {BYTES[work.masters]:g} bytes, gradients of {gradient_bytes(config)}, "
            f"two {work.moments} moments, sharded over replicas as the layout says; what each block keeps, with "
            "balanced experts; the fuller of the first and last pipeline stage at its peak"
        ),
    )


def _foreign_training_memory(config: RunConfig, work: Training) -> MemoryEstimate:
    """The first pipeline stage, which holds the most micro-batches; recompute and offload count its own layers."""
    model, split = config.model, config.parallel
    fp32 = config.precision.dtype == "fp32"
    per_weight, per_gradient, per_optimizer = FP32_STATE if fp32 else MIXED_STATE
    value_bytes = BYTES["fp32" if fp32 else "bf16"]
    layers = -(-model.layers // split.pp)
    dense_layer, routed_layer, embedding = _rank_parameters(model, split)
    dense = layers * dense_layer + embedding * (1 if model.tied_embeddings or split.pp > 1 else 2)
    routed = layers * routed_layer

    # fsdp shards everything; without it the optimizer still is (ZeRO-1), over cp too.
    replicas = split.dp * split.cp
    expert_replicas = max(1, replicas * split.tp // (split.ep * split.etp))
    whole, sharded = dense + routed, dense / replicas + routed / expert_replicas
    state = sharded if split.fsdp else whole
    gathered = max(dense_layer + routed_layer, embedding) * value_bytes if split.fsdp and replicas > 1 else 0.0

    tokens = work.mbs * work.seqlen / split.cp / split.tp
    layer = tokens * value_bytes * _saved_values(model)
    recomputed = min(work.recompute_layers, layers)
    offloaded_layers = min(work.offload_layers, layers - recomputed)
    kept = layer * (layers - recomputed - offloaded_layers) + recomputed * tokens * value_bytes * model.hidden
    in_flight = _micro_batches_in_flight(split, work.ga)
    activations = in_flight * kept + layer * (min(recomputed, 1) + min(offloaded_layers, 2))
    if split.pp == 1:
        activations += min(tokens, LOSS_PIECE_TOKENS / split.tp) * model.vocab * LOGIT_BYTES

    sharding = "sharded over dp with two layers gathered" if split.fsdp else "the optimizer's sharded over dp"
    return MemoryEstimate(
        weights=per_weight * state + 2 * gathered,
        gradients=per_gradient * state + gathered,
        optimizer=per_optimizer * sharded,
        activations=activations,
        host=in_flight * layer * offloaded_layers,
        device_budget=gpu(config.machine.gpu).memory_bytes,
        assumptions=(
            f"estimate: weights {per_weight:g}, gradients {per_gradient:g}, optimizer {per_optimizer:g} bytes a "
            f"parameter, {sharding}; activations split by tp and cp, fused attention and MLP, loss in pieces, "
            "balanced experts; a recomputed layer keeps its input, an offloaded one its activations on the host"
        ),
    )


def _rank_parameters(model: Model, split: Parallel) -> tuple[float, float, float]:
    """Parameters of one rank: the average layer's dense part, its routed experts, the embedding."""
    parts = parameter_breakdown(model)
    routed = sum(count * block.routed for _, count, block in stack(model))
    dense = parameters(model) - parts["embedding"] - parts.get("lm_head", 0) - routed
    experts_split = split.ep * split.etp
    return dense / model.layers / split.tp, routed / model.layers / experts_split, parts["embedding"] / split.tp


def _saved_values(model: Model) -> float:
    """Values one token leaves for the backward pass in the average layer."""
    return sum(count * block.saved_values for _, count, block in stack(model)) / model.layers


def _micro_batches_in_flight(split: Parallel, ga: int) -> float:
    """Micro-batches whose activations the first stage holds at once: pp with 1F1B, a little more when interleaved."""
    extra = (split.pp - 1) / split.vp if split.vp and split.vp > 1 else 0.0
    return min(ga, split.pp + extra)


def _inference_memory(config: RunConfig) -> MemoryEstimate:
    """Weights, one engine step's activations, and the cache of the requests in flight."""
    free, wanted = serving_capacity.free_bytes(config), serving_capacity.wanted_bytes(config)
    room = math.inf if free is None else serving_capacity.room(config, free).cache
    return MemoryEstimate(
        weights=serving_capacity.weight_bytes(config),
        activations=serving_capacity.workspace_bytes(config),
        kv_cache=min(wanted, room),
        device_budget=gpu(config.machine.gpu).memory_bytes,
        assumptions=(
            f"estimate: {bytes_of(config.precision.dtype):g} bytes a weight, embedding, head, norms and router bf16 or "
            f"wider; cache in {config.precision.kv_dtype or 'bf16'} of as many whole requests as are computed at once, "
            "at most kv_fraction of what weights and activations leave; activations of one block at max_num_tokens"
            + ("" if free is None else f"\n{serving_capacity.advice(config, free)}")
        ),
    )


def _out_of_core_memory(config: RunConfig, work: OutOfCore) -> MemoryEstimate:
    """What the plan takes, or, before there is one, the least."""
    return _least_out_of_core(config, work) if work.prediction is None else _planned_memory(work, work.prediction)


def _planned_memory(work: OutOfCore, expected: Prediction) -> MemoryEstimate:
    taken = dict(expected.device_bytes)
    return MemoryEstimate(
        weights=taken.pop("param", 0),
        gradients=taken.pop("grad", 0),
        optimizer=taken.pop("state", 0),
        activations=sum(taken.values()),
        host=sum(expected.host_bytes.values()),
        device_budget=work.device_gib * GIB,
        host_budget=work.host_gib * GIB,
        assumptions="by the plan: what it allocates on both sides, and a GPU's own context",
    )


def _least_out_of_core(config: RunConfig, work: OutOfCore) -> MemoryEstimate:
    """The least that must be there at once; the budgets are the user's, and the plan fills what is left of them."""
    model = config.model
    dense_layer, routed_layer, embedding = _rank_parameters(model, Parallel())
    layer, ends = dense_layer + routed_layer, embedding * (1 if model.tied_embeddings else 2)
    per_weight, per_gradient, per_optimizer = BF16_STATE
    tokens = min(work.seqlen, LOSS_PIECE_TOKENS)
    cache = work.seqlen * BYTES["bf16"] * max(block.kv_values for _, _, block in stack(model))
    layer_inputs = work.seqlen * BYTES["bf16"] * model.layers * model.hidden
    return MemoryEstimate(
        weights=per_weight * (2 * layer + ends),
        gradients=per_gradient * (2 * layer + ends),
        optimizer=per_optimizer * (layer + ends),
        activations=tokens * (2 * BYTES["bf16"] * _saved_values(model) + model.vocab * LOGIT_BYTES),
        kv_cache=2 * cache,
        host=sum(BF16_STATE) * model.layers * layer + per_weight * ends + layer_inputs,
        device_budget=work.device_gib * GIB,
        host_budget=work.host_gib * GIB,
        assumptions=(
            "estimate of the least: the host holds all weights, the layers' gradients and moments in bf16 "
            f"({sum(BF16_STATE):g} bytes a parameter) and every layer's input for one sequence; the device holds two "
            "layers' weights and gradients, one layer's moments, the whole state of embedding and head, activations "
            f"of {tokens} tokens, keys and values of one layer with their gradients"
        ),
    )
