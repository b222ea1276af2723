"""What a rank of the native training engine holds at its peak, by closed form.

    occupancy(config)      bytes of weights, gradients, optimizer and activations at the moment when most are held

A step is walked through in the order of its schedule. A pass of a part leaves what its layers keep, and the backward
pass takes it away; at each pass the most that it holds on its way is looked at. Optimizer state is there throughout.

Without fsdp a rank that shares its weights with others gathers them in the first forward pass of a step and lets go of
them in the last backward pass; in between gradients add up whole, in fp32. With fsdp layers are gathered as they are
needed: in the backward pass four times a layer's bf16 weights are there at once, its own, their gradients, and in fp32
those of the layer before it, which are being reduced. The embedding's and head's stay gathered.

In fp8 the routed experts' weights are kept in 8 bits, in two layouts, by ranks that do not gather them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llmb.config.spec import Parallel, RunConfig, Training
from llmb.perfmodel.activation_memory import Activations
from llmb.perfmodel.flops import BYTES, FP8_MULTIPLE
from llmb.perfmodel.pipeline_schedule import SENDS_UNDER_WAY, Pass, rank_order
from llmb.perfmodel.shards import (
    Part,
    Weight,
    end_weights,
    gradient_bytes,
    is_fused,
    is_halved,
    is_sharded,
    layer_weights,
    part_weights,
    rank_parts,
)

WEIGHTS, GRADIENTS, OPTIMIZER, REST = "weights", "gradients", "optimizer", "activations"
FP32 = BYTES["fp32"]
ON_THEIR_WAY = 4  # times a layer's weights in bf16, in a backward pass of sharded weights

Held = Counter[str]


def occupancy(config: RunConfig) -> dict[str, float]:
    """The fuller of the first and the last stage's ranks, at its peak."""
    walks = [Walk(config, rank) for rank in dict.fromkeys((0, config.parallel.pp - 1))]
    return max((walk.peak() for walk in walks), key=lambda held: sum(held.values()))


def offloaded(config: RunConfig) -> float:
    """What waits in the memory of the host for one rank of the first stage: of every micro-batch in flight."""
    sizes, parts, split = Activations(config), rank_parts(config), config.parallel
    layers = sum(sizes.layer(layer) for part in parts for layer in _offloaded(part))
    return layers * min(sizes.work.ga, split.pp)


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered and reduced together, in numbers of one rank."""

    computed: int  # what the rank computes with
    slices: int  # what it keeps for good
    gathered: int  # what it must gather for that

    @classmethod
    def of(cls, weights: Iterable[Weight], split: Parallel) -> "Unit":
        """Added up."""
        listed = list(weights)
        return cls(
            sum(one.on_rank(split).size for one in listed),
            sum(one.slice(split) for one in listed),
            sum(one.on_rank(split).size for one in listed if is_sharded(one, split)),
        )


class Walk:
    """One rank's step."""

    def __init__(self, config: RunConfig, rank: int):
        work = config.workload
        assert isinstance(work, Training)
        self.work, self.model, self.split, self.rank = work, config.model, config.parallel, rank
        self.fsdp = self.split.fsdp and self.split.sharers > 1
        self.halved, self.gradient = is_halved(config), gradient_bytes(config)
        self.sizes = Activations(config)
        self.parts = rank_parts(config, rank)
        self.units = [Unit.of(part_weights(self.model, part), self.split) for part in self.parts]
        self.layer = [Unit.of(layer_weights(self.model, part.layers[-1]), self.split) for part in self.parts]
        self.ends = [Unit.of(end_weights(self.model, part), self.split) for part in self.parts]
        self.kept = [self._kept(part) for part in self.parts]
        self.held: Held = Counter()
        self.most: Held = Counter()

    def peak(self) -> dict[str, float]:
        """What is held when most is."""
        slices = sum(unit.slices for unit in self.units)
        self._take(WEIGHTS, BYTES[self.work.masters] * slices + self._in_8_bits())
        self._take(OPTIMIZER, 2 * BYTES[self.work.moments] * slices)
        self._take(REST, SENDS_UNDER_WAY * self.sizes.stream * (self.split.pp > 1 and self.split.overlap_send))
        for one in rank_order(self.split.pp, self.split.vp, self.work.ga, self.rank):
            (self._forward if one.forward else self._backward)(one)
        return {name: float(self.most[name]) for name in (WEIGHTS, GRADIENTS, OPTIMIZER, REST)}

    def _in_8_bits(self) -> float:
        """Both forms of matrices that are cast once a step: experts' that stay here, and of layers by hand."""
        if not self.sizes.in_fp8:
            return 0.0
        weights = [one for part in self.parts for one in part_weights(self.model, part) if len(one.shape) > 1]
        if is_fused(self.sizes.config):
            ends = [one.size for part in self.parts for one in end_weights(self.model, part) if len(one.shape) > 1]
            return 2 * BYTES["fp8"] * (sum(one.size for one in weights) - sum(ends))
        routed = [one.on_rank(self.split) for one in weights if one.routed and not is_sharded(one, self.split)]
        fits = [one for one in routed if all(length % FP8_MULTIPLE == 0 for length in one.shape[1:])]
        return 2 * BYTES["fp8"] * sum(one.size for one in fits)

    def _take(self, name: str, size: float) -> None:
        self.held[name] += size  # type: ignore[assignment]
        self._look({})

    def _look(self, more: dict[str, float]) -> None:
        """Is there ever more than now, with so much on top?"""
        now = Counter(self.held)
        now.update(more)
        if sum(now.values()) > sum(self.most.values()):
            self.most = now

    def _forward(self, one: Pass) -> None:
        part, unit, sizes = self.parts[one.part], self.units[one.part], self.sizes
        if not self.fsdp and one.micro == 0:
            self._take(WEIGHTS, sizes.value * unit.gathered)
        if self.fsdp:
            self._take(WEIGHTS, sizes.value * self.ends[one.part].gathered)
        self._take(REST, self.kept[one.part])
        cast = unit.gathered == 0 and not self.halved
        working = sizes.loss_working(cast) if part.last else self._working(part, forward=True)
        # Gathered with the next one on its way, in two copies; behind the last layer one copy is left over.
        on_way = (1 if part.last else 3) * sizes.value * self.layer[one.part].gathered if self.fsdp else 0.0
        self._look({REST: working, WEIGHTS: on_way})

    def _backward(self, one: Pass) -> None:
        part, unit, sizes = self.parts[one.part], self.units[one.part], self.sizes
        again = sizes.layer(part.layers[-1]) if part.recomputed == len(part.layers) else 0.0
        received = 0.0 if part.last else sizes.stream
        working = self._working(part, forward=False, later=one.micro > 0)
        self._look({REST: working + again + received - self._added(one)})
        if part.last and unit.gathered:  # the head's gradient in both formats, and with fsdp the next layer on its way
            on_way = sizes.value * self.layer[one.part].gathered if self.fsdp else 0.0
            self._look({REST: sizes.value * sizes.head, WEIGHTS: on_way})
        if self.fsdp:
            self._look_at_gathered_layer(one)
        self._take(REST, -self.kept[one.part])
        last = one.micro == self.work.ga - 1
        if self.fsdp:
            self._take(WEIGHTS, -sizes.value * self.ends[one.part].gathered)
            if one.micro == 0:
                self._take(GRADIENTS, FP32 * unit.slices)
                kept = FP32 * self.ends[one.part].gathered  # torch holds what was reduced last until the step's end
                self._take(REST, 0.0 if last else kept)
        elif one.micro == 0:
            self._take(GRADIENTS, self.gradient * unit.computed)
            if part.first and part.last and self.model.tied_embeddings:  # both ends' gradients, and then their sum
                self._look({REST: 2 * self.gradient * self.model.vocab / self.split.tp * self.model.hidden})
        if last and not self.fsdp:
            self.held[WEIGHTS] -= sizes.value * unit.gathered  # type: ignore[assignment]
            self.held[GRADIENTS] -= FP32 * (unit.computed - unit.slices)  # type: ignore[assignment]

    def _added(self, one: Pass) -> float:
        """The head's gradient, which the loss kept, once it is part of one that was there: before the layers go back.

        Where the head is the embedding too, and torch adds the gradients up, it waits for the other end's.
        """
        part, alone = self.parts[one.part], self.units[one.part].gathered == 0 and self.split.tp == 1
        waits = part.first and self.model.tied_embeddings and not alone
        return FP32 * self.sizes.head if part.last and one.micro and not self.fsdp and not waits else 0.0

    def _look_at_gathered_layer(self, one: Pass) -> None:
        """The second layer of the backward pass: the first one's gradients are still being reduced."""
        part, sizes = self.parts[one.part], self.sizes
        gone = self._kept_layers(part)[-1]
        if part.last:  # the head's gradient now waits in the format of the weights
            gone += (FP32 - sizes.value) * self.model.vocab / self.split.tp * self.model.hidden
        flying = ON_THEIR_WAY * sizes.value * self.layer[one.part].gathered
        self._look({REST: self._working(part, forward=False) - gone + flying})

    def _kept(self, part: Part) -> float:
        """What a part's forward pass leaves: of layers and the loss. A received input stays if its layer's leaves."""
        layers = self._kept_layers(part)
        received = self.sizes.stream * (not part.first and layers[0] == 0)
        return sum(layers) + received + (self.sizes.loss if part.last else 0.0)

    def _kept_layers(self, part: Part) -> list[float]:
        """Of each layer: all, its input where it is computed again, nothing where it is offloaded."""
        away = set(_offloaded(part))
        return [
            self.sizes.recomputed_layer
            if place < part.recomputed
            else 0.0
            if layer in away
            else self.sizes.layer(layer)
            for place, layer in enumerate(part.layers)
        ]

    def _working(self, part: Part, forward: bool, later: bool = False) -> float:
        return self.sizes.working(part.layers[-1], forward, later)


def _offloaded(part: Part) -> list[int]:
    """Of the network's last layer nothing is: its backward pass comes next."""
    chosen = list(part.layers[part.recomputed : part.recomputed + part.offloaded])
    return [layer for layer in chosen if not (part.last and layer == part.layers[-1])]
