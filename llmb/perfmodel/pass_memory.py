"""Memory of one forward or backward pass of a model part, followed unit by unit (`llmb/train/parallel/fsdp.py`).

    passes = StagePasses(config, stage)
    passes.forward(first=True).peak                 # bytes above the memory before the pass, by purpose
    passes.backward(first=True, last=False).change  # bytes that it leaves, or frees

A forward pass adds the saved activations of each layer, a backward pass frees them, and each layer has working memory.
Full gradients of a unit exist from its backward pass on. Without fsdp they accumulate, until the last backward pass
reduces them to shards, unit by unit. With fsdp every backward pass does, and a unit's weights are gathered while it
runs, as are those of the next one. A unit's full gradients are freed when those of the following unit are complete.
Embedding and LM head are one unit, whose weights stay gathered from the first pass of a step to the last one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llmb.config.model import Model
from llmb.config.spec import Parallel, RunConfig, Training
from llmb.perfmodel.activation_memory import ActivationSizes
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.shards import (
    StageShape,
    Weight,
    end_weights,
    gradient_bytes,
    layer_blocks,
    layer_weights,
    replicated_values,
    weight_buckets,
)

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
FP32 = BYTES["fp32"]
BytesByPurpose = Counter[str]


@dataclass(frozen=True)
class UnitValues:
    """Numbers of values of an FSDP unit on one rank."""

    full: int  # of the matrices that it computes with
    shards: int  # of them that it updates
    gathered: int  # of the full ones: those that it shares with replicas
    replicated: int  # of fp32 weights

    @classmethod
    def of(cls, weights: Iterable[Weight], parallel: Parallel) -> "UnitValues":
        """Count those of all weights of a unit."""
        listed = list(weights)
        buckets = weight_buckets(listed, parallel)
        return cls(
            sum(bucket.size for bucket in buckets),
            sum(bucket.shard for bucket in buckets),
            sum(bucket.size for bucket in buckets if bucket.ranks > 1),
            replicated_values(listed, parallel),
        )

    @classmethod
    def of_stage(cls, model: Model, stage: StageShape, parallel: Parallel) -> list["UnitValues"]:
        """Count those of each FSDP unit of a stage; layers of the same blocks are alike."""
        by_blocks: dict[tuple[str, ...], UnitValues] = {}
        values = [cls.of(end_weights(model, stage), parallel)]
        for layer in stage.layers:
            blocks = layer_blocks(model, layer)
            if blocks not in by_blocks:
                by_blocks[blocks] = cls.of(layer_weights(model, layer), parallel)
            values.append(by_blocks[blocks])
        return values

    @property
    def gathered_shards(self) -> int:
        """Gathered values that the rank updates."""
        return self.shards - (self.full - self.gathered)


@dataclass(frozen=True)
class PassMemory:
    """Memory of a pass relative to its start."""

    peak: BytesByPurpose
    change: BytesByPurpose


class _Ledger:
    """Memory held since a pass began, and its peak."""

    def __init__(self) -> None:
        self.held: BytesByPurpose = Counter()
        self.peak: BytesByPurpose = Counter()
        self._peak_total = 0.0

    def add(self, name: str, size: float) -> None:
        """Allocate, or free a negative size."""
        self.held[name] += size  # type: ignore[assignment]
        self.use(name, 0.0)

    def use(self, name: str, size: float) -> None:
        """Allocate and free at once."""
        if self.held.total() + size > self._peak_total:
            self.peak = Counter(self.held)
            self.peak[name] += size  # type: ignore[assignment]
            self._peak_total = self.peak.total()

    def result(self) -> PassMemory:
        return PassMemory(self.peak, self.held)


class StagePasses:
    """Passes of one pipeline stage, or of the whole network."""

    def __init__(self, config: RunConfig, stage: StageShape):
        work = config.workload
        assert isinstance(work, Training)
        self.work, self.model, self.parallel, self.stage = work, config.model, config.parallel, stage
        self.sizes, self.grad_bytes = ActivationSizes(config), gradient_bytes(config)
        # Gradients are cast to be summed in another dtype.
        self.reduced_bytes = FP32 if config.precision.dtype == "fp32" else BYTES[work.reduce_dtype]
        self.root, *self.layers = UnitValues.of_stage(config.model, stage, config.parallel)
        self.saved = self._saved_layers()

    def forward(self, first: bool) -> PassMemory:
        """Return the memory of a forward pass, `first` of the stage in a step."""
        stage, sizes, ledger = self.stage, self.sizes, _Ledger()
        if first:
            self._gather(ledger, self.root)
        # What it received stays if its layer is offloaded, else it is what the layer saves.
        ledger.add(ACTIVATIONS, sizes.residual * (not stage.first and self.saved[0] == 0))
        self._gather(ledger, self.layers[0])
        for index, (layer, unit) in enumerate(zip(stage.layers, self.layers, strict=True)):
            is_last = index == len(self.layers) - 1
            if not is_last and self.parallel.overlap_gather:
                self._gather(ledger, self.layers[index + 1])
            ledger.add(ACTIVATIONS, self.saved[index])
            ledger.use(ACTIVATIONS, sizes.working(layer, forward=True) + self._copied(index))
            if not (is_last and stage.last):
                self._gather(ledger, unit, -1)
            if not is_last and not self.parallel.overlap_gather:
                self._gather(ledger, self.layers[index + 1])
        if stage.last:
            ledger.add(ACTIVATIONS, sizes.loss)
            ledger.use(ACTIVATIONS, sizes.loss_working)
        return ledger.result()

    def backward(self, first: bool, last: bool) -> PassMemory:
        """Return the memory of a backward pass, `first` or `last` of the stage in a step, or both."""
        stage, sizes, ledger = self.stage, self.sizes, _Ledger()
        if stage.last:
            self._add_gradients(ledger, self.root, first)
            ledger.add(ACTIVATIONS, -sizes.loss)
            ledger.use(ACTIVATIONS, sizes.loss - sizes.head_gradient)
        ledger.add(ACTIVATIONS, sizes.residual)  # its gradient, received or of the loss
        pending: UnitValues | None = None
        for index in reversed(range(len(self.layers))):
            unit, layer = self.layers[index], stage.layers[index]
            if not (stage.last and index == len(self.layers) - 1) and (
                index == len(self.layers) - 1 or not self.parallel.overlap_gather
            ):
                self._gather(ledger, unit)
            if index > 0 and self.parallel.overlap_gather:
                self._gather(ledger, self.layers[index - 1])
            self._add_gradients(ledger, unit, first)
            recomputed = sizes.layer(layer) - self.saved[index] if index < stage.recomputed else 0.0
            ledger.use(ACTIVATIONS, recomputed + sizes.working(layer, forward=False) + self._copied(index))
            ledger.add(ACTIVATIONS, -self.saved[index])
            self._gather(ledger, unit, -1)
            pending = self._reduce(ledger, unit, pending, first, last)
        if not stage.last:
            self._add_gradients(ledger, self.root, first)
        ledger.add(ACTIVATIONS, -sizes.residual * (1 + (not stage.first and self.saved[0] == 0)))
        pending = self._reduce(ledger, self.root, pending, first, last)
        self._free_reduced(ledger, pending)
        if last:
            self._gather(ledger, self.root, -1)
        return ledger.result()

    def _gather(self, ledger: _Ledger, unit: UnitValues, sign: int = 1) -> None:
        """Allocate the memory of gathered weights, or free it."""
        if self.parallel.fsdp:
            ledger.add(WEIGHTS, sign * self.sizes.value_bytes * unit.gathered)

    def _add_gradients(self, ledger: _Ledger, unit: UnitValues, first: bool) -> None:
        """Allocate full gradients that do not exist yet."""
        if first:
            ledger.add(GRADIENTS, self.grad_bytes * (unit.full - unit.gathered) + FP32 * unit.replicated)
        if first or self.parallel.fsdp:
            ledger.add(GRADIENTS, self.grad_bytes * unit.gathered)

    def _reduce(
        self, ledger: _Ledger, unit: UnitValues, pending: UnitValues | None, first: bool, last: bool
    ) -> UnitValues | None:
        """Reduce gradients to shards, then free those of the unit before; return the unit whose are to be freed."""
        if not (self.parallel.fsdp or last):
            return pending
        is_cast = self.reduced_bytes != self.grad_bytes
        ledger.add(GRADIENTS, self.reduced_bytes * unit.gathered * is_cast)
        ledger.add(GRADIENTS, self.grad_bytes * unit.gathered_shards)
        if self.parallel.fsdp and not first:
            ledger.add(GRADIENTS, -self.grad_bytes * unit.gathered_shards)  # added to those of earlier micro-batches
        self._free_reduced(ledger, pending)
        return unit

    def _free_reduced(self, ledger: _Ledger, unit: UnitValues | None) -> None:
        if unit is not None:
            is_cast = self.reduced_bytes != self.grad_bytes
            ledger.add(GRADIENTS, -(self.grad_bytes + self.reduced_bytes * is_cast) * unit.gathered)

    def _copied(self, index: int) -> float:
        """Bytes of offloaded layers that are on the device while one of them, or the next layer, runs."""
        on_host = offloaded_layers(self.stage)
        return sum(
            self.sizes.layer(layer) for layer in self.stage.layers[max(0, index - 1) : index + 1] if layer in on_host
        )

    def _saved_layers(self) -> list[float]:
        """Bytes saved by each layer: all, its input if recomputed, nothing if offloaded."""
        on_host, sizes = set(offloaded_layers(self.stage)), self.sizes
        return [
            sizes.recomputed_layer if index < self.stage.recomputed else 0.0 if layer in on_host else sizes.layer(layer)
            for index, layer in enumerate(self.stage.layers)
        ]


def offloaded_layers(stage: StageShape) -> list[int]:
    """Return the offloaded layers; never the last one of the network, whose backward pass comes next."""
    layers = list(stage.layers[stage.recomputed : stage.recomputed + stage.offloaded])
    return [layer for layer in layers if not (stage.last and layer == stage.layers[-1])]
