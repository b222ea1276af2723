"""The computation of an optimizer step, in order: what each part needs, makes, changes and is the last to need.

    for work in step_work(model, plan, beginning(plan, step=3)): ...

Forward goes layer by layer over all chunks of a round, so that a layer's weights are needed once; backward is the same
reversed. Nothing here knows what is on the device: `residency.py` finds out what must be copied, and when.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import Piece, Units

# Layers from one update of the head to the next: its units are done with at once, and the link takes its time to bring
# the state of each.
HEAD_UPDATES_EVERY = 2

Kind = Literal["update", "embedding", "forward", "head", "backward", "embedding_backward"]


class Chunk(NamedTuple):
    """Rows of a group that are computed at once."""

    group: int  # of the step
    number: int  # in its group
    first: int  # row of the group
    tokens: int
    place: int  # among the chunks of its round


class Work(NamedTuple):
    """One computation. A piece is in at most one of reads, makes and changes."""

    kind: Kind
    round: int
    layer: int  # or the unit that is updated; -1: none
    chunk: Chunk | None
    reads: tuple[Piece, ...]
    makes: tuple[Piece, ...]  # without looking at what was there
    changes: tuple[Piece, ...]
    ends: tuple[Piece, ...]  # of all these, those that nobody needs any more
    level: str = FULL  # of its layer and chunk
    last: bool = False  # the gradients that it makes or changes are complete for the step
    fresh: bool = False  # update: the first of all, before which there is no state


class Beginning(NamedTuple):
    """What a step finds: how many updates were made before, and whether the gradients of a step still wait for one."""

    updates: int
    waiting: bool


def beginning(plan: Plan, step: int) -> Beginning:
    """Of a run's step, from 0 on, where no checkpoint comes between."""
    if plan.update_at == "forward":
        return Beginning(max(0, step - 1), step > 0)
    return Beginning(step, False)


def step_work(model: Model, plan: Plan, found: Beginning) -> list[Work]:
    """All work of a step."""
    return list(_Step(model, plan, found).work())


def waiting_updates(model: Model, plan: Plan, found: Beginning) -> list[Work]:
    """Only the updates that still wait: before a checkpoint, and at the end of a run."""
    step = _Step(model, plan, found)
    return [step.update(0, unit) for unit in range(step.units.count)] if found.waiting else []


def chunks_of(plan: Plan, round_: int) -> list[Chunk]:
    """The chunks of a round, in forward order."""
    groups = range(round_ * plan.groups_per_round, min((round_ + 1) * plan.groups_per_round, plan.groups))
    found: list[Chunk] = []
    for group in groups:
        sequences = min(plan.seqs_per_group, plan.gbs - group * plan.seqs_per_group)
        rows = sequences * plan.seqlen
        for number, first in enumerate(range(0, rows, plan.chunk_tokens)):
            tokens = min(plan.chunk_tokens, rows - first)
            found.append(Chunk(group, number, first, tokens, len(found)))
    return found


class _Step:
    def __init__(self, model: Model, plan: Plan, found: Beginning):
        self.model, self.plan, self.found = model, plan, found
        self.units = Units(model)
        self.made: set[int] = set()  # units whose gradients this step has begun
        self.updated: set[int] = set()

    def work(self) -> Iterator[Work]:
        for round_ in range(self.plan.rounds):
            chunks = chunks_of(self.plan, round_)
            yield from self.forward(round_, chunks)
            yield from self.backward(round_, chunks)

    def forward(self, round_: int, chunks: list[Chunk]) -> Iterator[Work]:
        yield from self.updates_before(round_, self.units.embedding)
        params = tuple(Piece("param", unit) for unit in self.units.embedding)
        for chunk in chunks:
            yield Work("embedding", round_, -1, chunk, params, (_inp(0, chunk),), (), ())
        for layer in range(self.model.layers):
            yield from self.updates_before(round_, range(layer, layer + 1))
            for chunk in chunks:
                yield self.forward_layer(round_, layer, chunk)

    def forward_layer(self, round_: int, layer: int, chunk: Chunk) -> Work:
        level = self.level(layer, chunk)
        kv, made = _kv(layer, chunk), [_inp(layer + 1, chunk)]
        if level in (FULL, ATTENTION):
            made.append(_attn(layer, chunk))
        if level == FULL:
            made.append(_rest(layer, chunk))
        if chunk.number == 0:
            made.append(kv)
        changed = () if chunk.number == 0 else (kv,)
        reads = (Piece("param", layer), _inp(layer, chunk))
        return Work("forward", round_, layer, chunk, reads, tuple(made), changed, (), level)

    def backward(self, round_: int, chunks: list[Chunk]) -> Iterator[Work]:
        last = round_ == self.plan.rounds - 1
        yield from self.updates_before(round_, self.units.head)
        for chunk in chunks[::-1]:
            yield self.head(round_, chunk, last and chunk.place == 0)
        of_head = [] if self.model.tied_embeddings else list(self.units.head)
        for layer in reversed(range(self.model.layers)):
            for chunk in chunks[::-1]:
                yield self.backward_layer(round_, layer, chunk, last and chunk.place == 0)
            yield from self.updates_behind(round_, [layer])
            if (self.model.layers - layer) % HEAD_UPDATES_EVERY == 0 and of_head:
                yield from self.updates_behind(round_, [of_head.pop(0)])
        for chunk in chunks[::-1]:
            yield self.embedding_backward(round_, chunk, last and chunk.place == 0)
        yield from self.updates_behind(round_, [*of_head, *self.units.embedding])

    def head(self, round_: int, chunk: Chunk, last: bool) -> Work:
        inp = _inp(self.model.layers, chunk)
        params = tuple(Piece("param", unit) for unit in self.units.head)
        made, changed = self.grads(self.units.head)
        stream = Piece("dstream", -1, chunk.group, chunk.number)
        last = last and not self.model.tied_embeddings
        return Work("head", round_, -1, chunk, (*params, inp), (stream, *made), changed, (inp,), last=last)

    def backward_layer(self, round_: int, layer: int, chunk: Chunk, last: bool) -> Work:
        level = self.level(layer, chunk)
        own = [_inp(layer, chunk)]
        if level in (FULL, ATTENTION):
            own.append(_attn(layer, chunk))
        if level == FULL:
            own.append(_rest(layer, chunk))
        kv, dkv = _kv(layer, chunk), Piece("dkv", -1, chunk.group)
        made, changed = self.grads(range(layer, layer + 1))
        is_last_chunk = self.is_last_of_group(chunk)  # gone back through first
        made += (dkv,) if is_last_chunk else ()
        changed += () if is_last_chunk else (dkv,)
        ends = (*own, kv, dkv) if chunk.number == 0 else tuple(own)
        stream = Piece("dstream", -1, chunk.group, chunk.number)
        reads = (Piece("param", layer), kv, *own)
        return Work("backward", round_, layer, chunk, reads, made, (*changed, stream), ends, level, last)

    def embedding_backward(self, round_: int, chunk: Chunk, last: bool) -> Work:
        stream = Piece("dstream", -1, chunk.group, chunk.number)
        made, changed = self.grads(self.units.embedding)
        return Work("embedding_backward", round_, -1, chunk, (stream,), made, changed, (stream,), last=last)

    def grads(self, units: range) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Gradients of units: those that begin here, and those that go on."""
        new = [unit for unit in units if unit not in self.made]
        self.made.update(units)
        return (
            tuple(Piece("grad", unit) for unit in new),
            tuple(Piece("grad", unit) for unit in units if unit not in new),
        )

    def updates_before(self, round_: int, units: range) -> Iterator[Work]:
        """What waits from the step before, when its unit is about to be used."""
        if round_ == 0 and self.found.waiting:
            for unit in units:
                if unit not in self.updated:
                    yield self.update(round_, unit)

    def updates_behind(self, round_: int, units: Iterable[int]) -> Iterator[Work]:
        """Right behind the step's last gradient, where nothing has to be known of the other gradients."""
        if self.plan.update_at == "backward" and round_ == self.plan.rounds - 1:
            for unit in units:
                yield self.update(round_, unit)

    def update(self, round_: int, unit: int) -> Work:
        self.updated.add(unit)
        param, grad, state = Piece("param", unit), Piece("grad", unit), Piece("state", unit)
        fresh = self.found.updates == 0
        changes = (param,) if fresh else (param, state)
        makes = (state,) if fresh else ()
        return Work("update", round_, unit, None, (grad,), makes, changes, (grad,), fresh=fresh)

    def level(self, layer: int, chunk: Chunk) -> str:
        return self.plan.levels[layer * self.plan.chunks_per_round + chunk.place]

    def is_last_of_group(self, chunk: Chunk) -> bool:
        sequences = min(self.plan.seqs_per_group, self.plan.gbs - chunk.group * self.plan.seqs_per_group)
        return chunk.first + chunk.tokens == sequences * self.plan.seqlen


def _inp(layer: int, chunk: Chunk) -> Piece:
    return Piece("inp", layer, chunk.group, chunk.number)


def _attn(layer: int, chunk: Chunk) -> Piece:
    return Piece("attn", layer, chunk.group, chunk.number)


def _rest(layer: int, chunk: Chunk) -> Piece:
    return Piece("rest", layer, chunk.group, chunk.number)


def _kv(layer: int, chunk: Chunk) -> Piece:
    return Piece("kv", layer, chunk.group)
