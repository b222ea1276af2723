"""Memory estimate of a run: weights, gradients, optimizer, activations and KV cache, on GPU and host.

    memory_estimate(config).total / 2**30        GiB on the fullest GPU

Every estimate carries its assumptions.
"""

import math
from dataclasses import dataclass, field, replace

from llmb.config.model import Model
from llmb.config.spec import Inference, OutOfCore, Parallel, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel import serving_capacity
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.hardware import GIB, memory_bytes
from llmb.perfmodel.params import BYTES, bytes_per_value, parameter_breakdown, parameters
from llmb.perfmodel.shards import gradient_bytes
from llmb.perfmodel.training_memory import offloaded, peak_memory

# Training state in bytes per parameter: weights, gradients, optimizer. Adam has two moments; master weights are fp32.
FP32_STATE = (4.0, 4.0, 8.0)  # the weights are the master weights
MIXED_STATE = (2.0, 2.0, 12.0)  # the optimizer holds the master weights: external engines
BF16_STATE = (2.0, 2.0, 4.0)  # no master weights, moments in bf16: out of core
LOSS_CHUNK_TOKENS = 2048  # chunked loss: the full logits never exist
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
    total: float = field(init=False)  # of the above; a field, so that it is part of the plain data
    host: float = 0.0  # host memory, for this GPU
    device_budget: float | None = None  # memory of the GPU, or its limit; null when unknown
    host_budget: float | None = None  # limit of host memory; null when not limited
    assumptions: str

    def __post_init__(self) -> None:
        total = self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache
        object.__setattr__(self, "total", total)

    @property
    def fits(self) -> bool | None:
        """Return whether the estimate is within the budgets; null when the GPU's memory is unknown."""
        if self.device_budget is None:
            return None
        return self.total <= self.device_budget and (self.host_budget is None or self.host <= self.host_budget)


def memory_estimate(config: RunConfig) -> MemoryEstimate:
    """Return the estimated memory of the run on one GPU and on its host."""
    for degree in ("dp", "tp", "pp", "cp", "ep", "etp"):
        if getattr(config.parallel, degree) < 1:
            raise ConfigError(f"{degree} must be 1 or more, got {getattr(config.parallel, degree)}")
    match config.workload:
        case Training() as work if config.engine == "native":
            return _native_training_memory(config, work)
        case Training() as work:
            return _external_training_memory(config, work)
        case Inference():
            return _inference_memory(config)
        case OutOfCore(prediction=None) as work:  # before there is a plan
            return _minimum_out_of_core(config, work)
        case OutOfCore() as work:
            return _planned_memory(work)


def _native_training_memory(config: RunConfig, work: Training) -> MemoryEstimate:
    """Native engine, all of whose tensors are known."""
    whose = "the first or last pipeline stage, whichever needs more"
    if config.one_rank is not None:
        whose = f"rank {config.one_rank.rank} of {config.parallel.world_size}"
    return MemoryEstimate(
        **peak_memory(config),
        host=offloaded(config),
        device_budget=memory_bytes(config.launch_machine),
        assumptions=(
            f"estimate: weights of {BYTES[work.master_weights]:g} bytes, gradients of {gradient_bytes(config)}, "
            f"two {work.moments} moments, sharded over replicas by the layout; saved activations of each block, with "
            f"balanced experts; {whose}, at its peak"
        ),
    )


def _external_training_memory(config: RunConfig, work: Training) -> MemoryEstimate:
    """First pipeline stage, which holds the most micro-batches; recompute and offload count its layers."""
    model, split = config.model, config.parallel
    fp32 = config.precision.dtype == "fp32"
    per_weight, per_gradient, per_optimizer = FP32_STATE if fp32 else MIXED_STATE
    value_bytes = BYTES["fp32" if fp32 else "bf16"]
    layers = -(-model.layers // split.pp)
    stage = replace(model, layers=layers, pattern=model.pattern[:layers]) if model.pattern else model
    dense_layer, routed_layer, embedding = _rank_parameters(stage, split)
    dense = layers * dense_layer + embedding * (1 if model.tied_embeddings or split.pp > 1 else 2)
    routed = layers * routed_layer

    # fsdp shards everything; without it the optimizer still is (ZeRO-1), over cp too.
    replicas = split.dp * split.cp
    expert_replicas = max(1, replicas * split.tp // (split.ep * split.etp))
    whole, sharded = dense + routed, dense / replicas + routed / expert_replicas
    state = sharded if split.fsdp else whole
    gathered = max(dense_layer + routed_layer, embedding) * value_bytes if split.fsdp and replicas > 1 else 0.0

    tokens = work.mbs * work.seqlen / split.cp / split.tp
    layer = tokens * value_bytes * _saved_values(stage)
    recomputed = min(work.recompute_layers, layers)
    offloaded_layers = min(work.offload_layers, layers - recomputed)
    saved = layer * (layers - recomputed - offloaded_layers) + recomputed * tokens * value_bytes * model.hidden
    in_flight = _micro_batches_in_flight(split, work.ga)
    activations = in_flight * saved + layer * (min(recomputed, 1) + min(offloaded_layers, 2))
    if split.pp == 1:
        activations += min(tokens, LOSS_CHUNK_TOKENS / split.tp) * model.vocab * LOGIT_BYTES

    sharding = "sharded over dp with two layers gathered" if split.fsdp else "the optimizer's sharded over dp"
    return MemoryEstimate(
        weights=per_weight * state + 2 * gathered,
        gradients=per_gradient * state + gathered,
        optimizer=per_optimizer * sharded,
        activations=activations,
        host=in_flight * layer * offloaded_layers,
        device_budget=memory_bytes(config.launch_machine),
        assumptions=(
            f"estimate: weights {per_weight:g}, gradients {per_gradient:g}, optimizer {per_optimizer:g} bytes per "
            f"parameter, {sharding}; activations split by tp and cp, fused attention and MLP, chunked loss, "
            "balanced experts; a recomputed layer saves its input, an offloaded one its activations on the host"
        ),
    )


def _rank_parameters(model: Model, split: Parallel) -> tuple[float, float, float]:
    """Return the parameters of one rank: dense part and routed experts of the average layer, and the embedding."""
    components = parameter_breakdown(model)
    routed = sum(count * block.routed_weights for _, count, block in block_stack(model))
    dense = parameters(model) - components["embedding"] - components.get("lm_head", 0) - routed
    experts_split = split.ep * split.etp
    return dense / model.layers / split.tp, routed / model.layers / experts_split, components["embedding"] / split.tp


def _saved_values(model: Model) -> float:
    """Return the values saved per token in the average layer."""
    return sum(count * block.saved_values for _, count, block in block_stack(model)) / model.layers


def _micro_batches_in_flight(split: Parallel, ga: int) -> float:
    """Return the micro-batches whose activations the first stage holds: pp with 1F1B, more when interleaved."""
    extra = (split.pp - 1) / split.vp if split.vp and split.vp > 1 else 0.0
    return min(ga, split.pp + extra)


def _inference_memory(config: RunConfig) -> MemoryEstimate:
    """Weights, activations of one engine step, and the KV cache of the running requests."""
    free, needed = serving_capacity.free_bytes(config), serving_capacity.requested_cache_bytes(config)
    available = math.inf if free is None else serving_capacity.cache_capacity(config, free).cache
    return MemoryEstimate(
        weights=serving_capacity.weight_bytes(config),
        activations=serving_capacity.workspace_bytes(config),
        kv_cache=min(needed, available),
        device_budget=memory_bytes(config.launch_machine),
        assumptions=(
            f"estimate: {bytes_per_value(config.precision.dtype):g} bytes per weight, embedding, head, norms and "
            f"router bf16 or wider; KV cache in {config.precision.kv_dtype or 'bf16'} of as many whole requests as "
            "run at once, at most kv_fraction of what weights and activations leave; activations of one block at "
            "max_num_tokens" + ("" if free is None else f"\n{serving_capacity.advice(config, free)}")
        ),
    )


def _planned_memory(work: OutOfCore) -> MemoryEstimate:
    assert work.prediction is not None
    by_kind = dict(work.prediction.device_bytes)
    return MemoryEstimate(
        weights=by_kind.pop("param", 0),
        gradients=by_kind.pop("grad", 0),
        optimizer=by_kind.pop("state", 0) + by_kind.pop("adapters", 0),
        activations=sum(by_kind.values()),
        host=sum(work.prediction.host_bytes.values()),
        device_budget=work.device_gib * GIB,
        host_budget=work.host_gib * GIB,
        assumptions="by the plan: its allocations on device and host, and the CUDA context",
    )


def _minimum_out_of_core(config: RunConfig, work: OutOfCore) -> MemoryEstimate:
    """Minimum that must be in memory at once; the plan uses the rest of the user's budgets."""
    model = config.model
    dense_layer, routed_layer, embedding = _rank_parameters(model, Parallel())
    layer, ends = dense_layer + routed_layer, embedding * (1 if model.tied_embeddings else 2)
    per_weight, per_gradient, per_optimizer = BF16_STATE
    tokens = min(work.seqlen, LOSS_CHUNK_TOKENS)
    cache = work.seqlen * BYTES["bf16"] * max(block.kv_values for _, _, block in block_stack(model))
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
            "estimate of the minimum: the host holds all weights, the layers' gradients and moments in bf16 "
            f"({sum(BF16_STATE):g} bytes per parameter) and every layer's input for one sequence; the device holds two "
            "layers' weights and gradients, one layer's moments, the whole state of embedding and head, activations "
            f"of {tokens} tokens, keys and values of one layer with their gradients"
        ),
    )
