"""Tasks of an optimizer step, in order: what each reads, makes, changes, and is the last to need.

    for task in step_tasks(model, plan, step_start(plan, step=3)): ...

Forward goes layer by layer over all chunks of a round, so that a layer's weights are needed once; backward is the same
reversed. Nothing here knows what is on the device: `residency.py` decides what must be copied, and when.

With LoRA no bucket has a gradient, so backward ends with the first layer; one update of all adapters ends the step.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from llmb.config.model import Model
from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.perfmodel.offload.buffers import BufferKey, ParamBuckets

# Layers from one update of the head to the next: all its buckets are complete at once, and the link needs time to bring
# the state of each.
HEAD_UPDATES_EVERY = 2

TaskKind = Literal["update", "embedding", "forward", "head", "backward", "embedding_backward"]


class Chunk(NamedTuple):
    """Rows of a group that are computed at once."""

    group: int  # of the step
    number: int  # in its group
    first: int  # row of the group
    tokens: int
    place: int  # index among the chunks of its round


class StepTask(NamedTuple):
    """One computation. A key is in at most one of reads, makes and changes."""

    kind: TaskKind
    round: int
    layer: int  # or the bucket that is updated; -1: none, or all adapters
    chunk: Chunk | None
    reads: tuple[BufferKey, ...]
    makes: tuple[BufferKey, ...]  # overwritten without being read
    changes: tuple[BufferKey, ...]
    ends: tuple[BufferKey, ...]  # those of all these that no later task needs
    level: str = FULL  # save level of its layer and chunk
    last: bool = False  # the gradients that it makes or changes are complete for the step
    first_update: bool = False  # update: the very first, before which there is no optimizer state


class StepStart(NamedTuple):
    """State at the start of a step: updates done before, and whether gradients of the previous step are pending."""

    updates: int
    pending: bool


def step_start(plan: Plan, step: int) -> StepStart:
    """Return the state at the start of a run's step, from 0 on, where no checkpoint comes between."""
    if plan.update_at == "forward":
        return StepStart(max(0, step - 1), step > 0)
    return StepStart(step, False)


def step_tasks(model: Model, plan: Plan, start: StepStart) -> list[StepTask]:
    """Return all tasks of a step."""
    return list(_Step(model, plan, start).tasks())


def pending_updates(model: Model, plan: Plan, start: StepStart) -> list[StepTask]:
    """Return only the pending updates: before a checkpoint, and at the end of a run."""
    step = _Step(model, plan, start)
    return [step.update(0, bucket) for bucket in range(step.buckets.count)] if start.pending else []


def round_chunks(plan: Plan, round_: int) -> list[Chunk]:
    """Return the chunks of a round, in forward order."""
    groups = range(round_ * plan.groups_per_round, min((round_ + 1) * plan.groups_per_round, plan.groups))
    chunks: list[Chunk] = []
    for group in groups:
        sequences = min(plan.seqs_per_group, plan.gbs - group * plan.seqs_per_group)
        rows = sequences * plan.seqlen
        for number, first in enumerate(range(0, rows, plan.chunk_tokens)):
            tokens = min(plan.chunk_tokens, rows - first)
            chunks.append(Chunk(group, number, first, tokens, len(chunks)))
    return chunks


class _Step:
    def __init__(self, model: Model, plan: Plan, start: StepStart):
        self.model, self.plan, self.start = model, plan, start
        self.buckets = ParamBuckets(model)
        self.with_grads: set[int] = set()  # buckets whose gradients this step has begun
        self.updated: set[int] = set()

    def tasks(self) -> Iterator[StepTask]:
        for round_ in range(self.plan.rounds):
            chunks = round_chunks(self.plan, round_)
            yield from self.forward(round_, chunks)
            yield from self.backward(round_, chunks)

    def forward(self, round_: int, chunks: list[Chunk]) -> Iterator[StepTask]:
        yield from self.updates_before(round_, self.buckets.embedding)
        params = tuple(BufferKey("param", bucket) for bucket in self.buckets.embedding)
        for chunk in chunks:
            yield StepTask("embedding", round_, -1, chunk, params, (_inp(0, chunk),), (), ())
        for layer in range(self.model.layers):
            yield from self.updates_before(round_, range(layer, layer + 1))
            for chunk in chunks:
                yield self.forward_layer(round_, layer, chunk)

    def forward_layer(self, round_: int, layer: int, chunk: Chunk) -> StepTask:
        level = self.level(layer, chunk)
        kv, makes = _kv(layer, chunk), [_inp(layer + 1, chunk)]
        if level in (FULL, ATTENTION):
            makes.append(_attn(layer, chunk))
        if level == FULL:
            makes.append(_saved_activations(layer, chunk))
        if chunk.number == 0:
            makes.append(kv)
        changes = () if chunk.number == 0 else (kv,)
        reads = (BufferKey("param", layer), _inp(layer, chunk))
        return StepTask("forward", round_, layer, chunk, reads, tuple(makes), changes, (), level)

    def backward(self, round_: int, chunks: list[Chunk]) -> Iterator[StepTask]:
        is_frozen, is_last_round = self.plan.lora is not None, round_ == self.plan.rounds - 1
        last = is_last_round and not is_frozen
        yield from self.updates_before(round_, self.buckets.head)
        for chunk in chunks[::-1]:
            yield self.head(round_, chunk, last and chunk.place == 0)
        head_buckets = [] if self.model.tied_embeddings else list(self.buckets.head)
        for layer in reversed(range(self.model.layers)):
            for chunk in chunks[::-1]:
                yield self.backward_layer(round_, layer, chunk, last and chunk.place == 0)
            yield from self.updates_after(round_, [layer])
            if (self.model.layers - layer) % HEAD_UPDATES_EVERY == 0 and head_buckets:
                yield from self.updates_after(round_, [head_buckets.pop(0)])
        if is_frozen:
            if is_last_round:
                yield StepTask("update", round_, -1, None, (), (), (), ())
            return
        for chunk in chunks[::-1]:
            yield self.embedding_backward(round_, chunk, last and chunk.place == 0)
        yield from self.updates_after(round_, [*head_buckets, *self.buckets.embedding])

    def head(self, round_: int, chunk: Chunk, last: bool) -> StepTask:
        inp = _inp(self.model.layers, chunk)
        params = tuple(BufferKey("param", bucket) for bucket in self.buckets.head)
        makes, changes = self.grads(self.buckets.head)
        last = last and not self.model.tied_embeddings
        return StepTask(
            "head", round_, -1, chunk, (*params, inp), (_d_residual(chunk), *makes), changes, (inp,), last=last
        )

    def backward_layer(self, round_: int, layer: int, chunk: Chunk, last: bool) -> StepTask:
        level = self.level(layer, chunk)
        saved = [_inp(layer, chunk)]
        if level in (FULL, ATTENTION):
            saved.append(_attn(layer, chunk))
        if level == FULL:
            saved.append(_saved_activations(layer, chunk))
        kv, dkv = _kv(layer, chunk), BufferKey("dkv", -1, chunk.group)
        makes, changes = self.grads(range(layer, layer + 1))
        is_last_chunk = self.is_last_of_group(chunk)  # first in backward
        makes += (dkv,) if is_last_chunk else ()
        changes += () if is_last_chunk else (dkv,)
        ends = (*saved, kv, dkv) if chunk.number == 0 else tuple(saved)
        if layer == 0 and self.plan.lora is not None:
            ends = (*ends, _d_residual(chunk))
        reads = (BufferKey("param", layer), kv, *saved)
        return StepTask(
            "backward", round_, layer, chunk, reads, makes, (*changes, _d_residual(chunk)), ends, level, last
        )

    def embedding_backward(self, round_: int, chunk: Chunk, last: bool) -> StepTask:
        d_residual = _d_residual(chunk)
        makes, changes = self.grads(self.buckets.embedding)
        return StepTask(
            "embedding_backward", round_, -1, chunk, (d_residual,), makes, changes, (d_residual,), last=last
        )

    def grads(self, buckets: range) -> tuple[tuple[BufferKey, ...], tuple[BufferKey, ...]]:
        """Return the gradients of buckets that begin here, and those that are accumulated into."""
        if self.plan.lora is not None:
            return (), ()
        new = [bucket for bucket in buckets if bucket not in self.with_grads]
        self.with_grads.update(buckets)
        return (
            tuple(BufferKey("grad", bucket) for bucket in new),
            tuple(BufferKey("grad", bucket) for bucket in buckets if bucket not in new),
        )

    def updates_before(self, round_: int, buckets: range) -> Iterator[StepTask]:
        """Yield the pending updates of the previous step, when their buckets are about to be used."""
        if round_ == 0 and self.start.pending:
            for bucket in buckets:
                if bucket not in self.updated:
                    yield self.update(round_, bucket)

    def updates_after(self, round_: int, buckets: Iterable[int]) -> Iterator[StepTask]:
        """Yield updates right behind the step's last gradient, where they do not depend on other gradients."""
        if self.plan.lora is None and self.plan.update_at == "backward" and round_ == self.plan.rounds - 1:
            for bucket in buckets:
                yield self.update(round_, bucket)

    def update(self, round_: int, bucket: int) -> StepTask:
        self.updated.add(bucket)
        param, grad, state = BufferKey("param", bucket), BufferKey("grad", bucket), BufferKey("state", bucket)
        first_update = self.start.updates == 0
        changes = (param,) if first_update else (param, state)
        makes = (state,) if first_update else ()
        return StepTask("update", round_, bucket, None, (grad,), makes, changes, (grad,), first_update=first_update)

    def level(self, layer: int, chunk: Chunk) -> str:
        return self.plan.levels[layer * self.plan.chunks_per_round + chunk.place]

    def is_last_of_group(self, chunk: Chunk) -> bool:
        sequences = min(self.plan.seqs_per_group, self.plan.gbs - chunk.group * self.plan.seqs_per_group)
        return chunk.first + chunk.tokens == sequences * self.plan.seqlen


def _inp(layer: int, chunk: Chunk) -> BufferKey:
    return BufferKey("inp", layer, chunk.group, chunk.number)


def _attn(layer: int, chunk: Chunk) -> BufferKey:
    return BufferKey("attn", layer, chunk.group, chunk.number)


def _saved_activations(layer: int, chunk: Chunk) -> BufferKey:
    return BufferKey("rest", layer, chunk.group, chunk.number)


def _kv(layer: int, chunk: Chunk) -> BufferKey:
    return BufferKey("kv", layer, chunk.group)


def _d_residual(chunk: Chunk) -> BufferKey:
    return BufferKey("dstream", -1, chunk.group, chunk.number)
