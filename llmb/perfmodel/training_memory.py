"""Peak memory of a rank of the native training engine, in closed form.

    peak_memory(config)      bytes of weights, gradients, optimizer and activations at the memory peak

The passes of a step are simulated in schedule order: a forward pass of a stage adds the saved activations of its
layers, the backward pass frees them, and each pass has a transient maximum. Optimizer state is always there.

Without fsdp a rank all-gathers sharded weights in the first forward pass of a step and frees them in the last backward
pass; in between full gradients accumulate in fp32. With fsdp layers are gathered when needed: in backward four times
the bf16 weights of a layer are in memory at once: the weights, their gradients, and in fp32 the gradients of the
previous layer, which are being reduced. Those of embedding and LM head stay gathered.

In fp8, ranks that do not gather routed experts cache their weights in fp8, in two layouts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llmb.config.spec import Parallel, RunConfig, Training
from llmb.perfmodel.activation_memory import ActivationSizes
from llmb.perfmodel.params import BYTES, FP8_ALIGNMENT
from llmb.perfmodel.pipeline_schedule import MAX_PENDING_SENDS, Pass, rank_order
from llmb.perfmodel.shards import (
    StageShape,
    Weight,
    end_weights,
    gradient_bytes,
    has_split_weights,
    is_fused,
    is_sharded,
    layer_weights,
    rank_stages,
    stage_weights,
)

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
FP32 = BYTES["fp32"]
FSDP_BACKWARD_COPIES = 4  # times a layer's bf16 weights, see above
SIMULATED_ROUNDS = 4  # of pp micro-batches each: warm-up, two steady rounds and cool-down contain every peak of a step


def peak_memory(config: RunConfig) -> dict[str, float]:
    """Return the memory of a rank of the first or last stage, whichever needs more, at its peak."""
    peaks = [StepMemory(config, rank).peak() for rank in dict.fromkeys((0, config.parallel.pp - 1))]
    return max(peaks, key=lambda memory: sum(memory.values()))


def offloaded(config: RunConfig) -> float:
    """Return the host memory for offloaded activations of a first-stage rank, of all micro-batches in flight."""
    sizes, stages, parallel = ActivationSizes(config), rank_stages(config), config.parallel
    layers = sum(sizes.layer(layer) for stage in stages for layer in _offloaded_layers(stage))
    return layers * min(sizes.work.ga, parallel.pp)


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are gathered and reduced together, in values of one rank."""

    local: int  # that the rank computes with
    shards: int  # that it holds permanently
    gathered: int  # that it must all-gather

    @classmethod
    def of(cls, weights: Iterable[Weight], parallel: Parallel) -> "WeightGroup":
        """Sum over weights."""
        listed = list(weights)
        return cls(
            sum(weight.on_rank(parallel).size for weight in listed),
            sum(weight.optimizer_shard(parallel) for weight in listed),
            sum(weight.on_rank(parallel).size for weight in listed if is_sharded(weight, parallel)),
        )


class StepMemory:
    """Memory of one rank over the passes of a step."""

    def __init__(self, config: RunConfig, rank: int):
        work = config.workload
        assert isinstance(work, Training)
        self.work, self.model, self.parallel, self.rank = work, config.model, config.parallel, rank
        self.fsdp = self.parallel.fsdp and self.parallel.dp_cp_size > 1
        self.split_weights, self.grad_bytes = has_split_weights(config), gradient_bytes(config)
        self.sizes = ActivationSizes(config)
        self.micro_batches = _simulated_micro_batches(work.ga, self.parallel.pp)
        self.stages = rank_stages(config, rank)
        self.all_weights = [WeightGroup.of(stage_weights(self.model, s), self.parallel) for s in self.stages]
        self.last_layer = [WeightGroup.of(layer_weights(self.model, s.layers[-1]), self.parallel) for s in self.stages]
        self.ends = [WeightGroup.of(end_weights(self.model, s), self.parallel) for s in self.stages]
        self.saved = [self._saved(stage) for stage in self.stages]
        self._working_bytes: dict[tuple[int, bool, bool], float] = {}  # of a layer, forward or not, accumulating or not
        self.current: Counter[str] = Counter()
        self.maximum: Counter[str] = Counter()

    def peak(self) -> dict[str, float]:
        """Return the memory at the peak of the step."""
        shards = sum(group.shards for group in self.all_weights)
        self._allocate(WEIGHTS, BYTES[self.work.master_weights] * shards + self._fp8_cache())
        self._allocate(OPTIMIZER, 2 * BYTES[self.work.moments] * shards)
        overlap_send = self.parallel.pp > 1 and self.parallel.overlap_send
        self._allocate(ACTIVATIONS, MAX_PENDING_SENDS * self.sizes.residual * overlap_send)
        for action in rank_order(self.parallel.pp, self.parallel.vp, self.micro_batches, self.rank):
            (self._forward if action.forward else self._backward)(action)
        return {name: float(self.maximum[name]) for name in (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS)}

    def _fp8_cache(self) -> float:
        """Bytes of weights quantized once per step, in both layouts: local experts, and matrices of fused layers."""
        if not self.sizes.is_fp8:
            return 0.0
        weights = [w for stage in self.stages for w in stage_weights(self.model, stage) if len(w.shape) > 1]
        if is_fused(self.sizes.config):
            ends = [w.size for stage in self.stages for w in end_weights(self.model, stage) if len(w.shape) > 1]
            return 2 * BYTES["fp8"] * (sum(weight.size for weight in weights) - sum(ends))
        if self.work.fp8_experts is False:
            return 0.0
        routed = [w.on_rank(self.parallel) for w in weights if w.routed and not is_sharded(w, self.parallel)]
        aligned = [w for w in routed if all(length % FP8_ALIGNMENT == 0 for length in w.shape[1:])]
        return 2 * BYTES["fp8"] * sum(weight.size for weight in aligned)

    def _allocate(self, name: str, size: float) -> None:
        self.current[name] += size  # type: ignore[assignment]
        self._update_maximum({})

    def _update_maximum(self, transient: dict[str, float]) -> None:
        """Update the peak with the current allocations and transient ones."""
        total = Counter(self.current)
        total.update(transient)
        if sum(total.values()) > sum(self.maximum.values()):
            self.maximum = total

    def _forward(self, action: Pass) -> None:
        stage, group, sizes = self.stages[action.stage], self.all_weights[action.stage], self.sizes
        if not self.fsdp and action.micro == 0:
            self._allocate(WEIGHTS, sizes.value_bytes * group.gathered)
        if self.fsdp:
            self._allocate(WEIGHTS, sizes.value_bytes * self.ends[action.stage].gathered)
        self._allocate(ACTIVATIONS, self.saved[action.stage])
        cast = group.gathered == 0 and not self.split_weights
        working = sizes.loss_working(cast) if stage.last else self._working(stage, forward=True)
        # A layer and the prefetched next one, the latter in two copies; after the last layer one copy remains.
        copies = 1 if stage.last else 3
        prefetched = copies * sizes.value_bytes * self.last_layer[action.stage].gathered if self.fsdp else 0.0
        self._update_maximum({ACTIVATIONS: working, WEIGHTS: prefetched})

    def _backward(self, action: Pass) -> None:
        stage, group, sizes = self.stages[action.stage], self.all_weights[action.stage], self.sizes
        recomputed = sizes.layer(stage.layers[-1]) if stage.recomputed == len(stage.layers) else 0.0
        received = 0.0 if stage.last else sizes.residual
        working = self._working(stage, forward=False, accumulated=action.micro > 0)
        self._update_maximum({ACTIVATIONS: working + recomputed + received - self._freed_head_gradient(action)})
        if stage.last and group.gathered:  # the head's gradient in both dtypes, and with fsdp the prefetched layer
            prefetched = sizes.value_bytes * self.last_layer[action.stage].gathered if self.fsdp else 0.0
            self._update_maximum({ACTIVATIONS: sizes.value_bytes * sizes.head, WEIGHTS: prefetched})
        if self.fsdp:
            self._update_fsdp_maximum(action)
        self._allocate(ACTIVATIONS, -self.saved[action.stage])
        last = action.micro == self.micro_batches - 1
        if self.fsdp:
            self._allocate(WEIGHTS, -sizes.value_bytes * self.ends[action.stage].gathered)
            if action.micro == 0:
                self._allocate(GRADIENTS, FP32 * group.shards)
                reduced = (
                    FP32 * self.ends[action.stage].gathered
                )  # torch holds the last reduced one until the step ends
                self._allocate(ACTIVATIONS, 0.0 if last else reduced)
        elif action.micro == 0:
            self._allocate(GRADIENTS, self.grad_bytes * group.local)
            if stage.first and stage.last and self.model.tied_embeddings:  # gradients of both ends, and their sum
                matrix = self.model.vocab / self.parallel.tp * self.model.hidden
                self._update_maximum({ACTIVATIONS: 2 * self.grad_bytes * matrix})
        if last and not self.fsdp:
            self.current[WEIGHTS] -= sizes.value_bytes * group.gathered  # type: ignore[assignment]
            self.current[GRADIENTS] -= FP32 * (group.local - group.shards)  # type: ignore[assignment]

    def _freed_head_gradient(self, action: Pass) -> float:
        """The head's gradient, which the loss saved, once it is accumulated: before the layers run backward.

        With tied embeddings, where autograd sums the gradients, it waits for the one of the embedding.
        """
        stage = self.stages[action.stage]
        alone = self.all_weights[action.stage].gathered == 0 and self.parallel.tp == 1
        waits = stage.first and self.model.tied_embeddings and not alone
        return FP32 * self.sizes.head if stage.last and action.micro and not self.fsdp and not waits else 0.0

    def _update_fsdp_maximum(self, action: Pass) -> None:
        """Consider the second layer in backward: the gradients of the first one are still being reduced."""
        stage, sizes = self.stages[action.stage], self.sizes
        freed = self._saved_layers(stage)[-1]
        if stage.last:  # the head's gradient is now in the dtype of the weights
            freed += (FP32 - sizes.value_bytes) * self.model.vocab / self.parallel.tp * self.model.hidden
        copies = FSDP_BACKWARD_COPIES * sizes.value_bytes * self.last_layer[action.stage].gathered
        self._update_maximum({ACTIVATIONS: self._working(stage, forward=False) - freed + copies})

    def _saved(self, stage: StageShape) -> float:
        """Bytes saved by a forward pass: layers and loss. A received input stays if its layer is offloaded."""
        layers = self._saved_layers(stage)
        received = self.sizes.residual * (not stage.first and layers[0] == 0)
        return sum(layers) + received + (self.sizes.loss if stage.last else 0.0)

    def _saved_layers(self, stage: StageShape) -> list[float]:
        """Bytes saved by each layer: all, its input if recomputed, nothing if offloaded."""
        on_host = set(_offloaded_layers(stage))
        return [
            self.sizes.recomputed_layer
            if index < stage.recomputed
            else 0.0
            if layer in on_host
            else self.sizes.layer(layer)
            for index, layer in enumerate(stage.layers)
        ]

    def _working(self, stage: StageShape, forward: bool, accumulated: bool = False) -> float:
        key = stage.layers[-1], forward, accumulated
        if key not in self._working_bytes:
            self._working_bytes[key] = self.sizes.working(*key)
        return self._working_bytes[key]


def _simulated_micro_batches(ga: int, pp: int) -> int:
    """Return how many of a step's micro-batches to simulate: the steady rounds of a long step are all alike."""
    simulated = SIMULATED_ROUNDS * pp + ga % pp
    return min(ga, simulated)


def _offloaded_layers(stage: StageShape) -> list[int]:
    """Return the offloaded layers; never the last one of the network, whose backward pass comes next."""
    layers = list(stage.layers[stage.recomputed : stage.recomputed + stage.offloaded])
    return [layer for layer in layers if not (stage.last and layer == stage.layers[-1])]
