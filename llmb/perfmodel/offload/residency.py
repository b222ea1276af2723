"""Assignment of buffer contents to device buffers at every moment of a step, decided once before the step runs.

    residency = Residency(model, plan)
    program = residency.program(tasks, ahead)    # ahead: the tasks behind it, as far as one wants to look
    residency.restore(residency.snapshot())      # equal snapshots and equal tasks give equal programs

Each kind has a number of device buffers. When a task needs one more, the content whose next use is farthest is evicted;
if the host has no valid copy of it, it was copied out right behind its last use, long before its buffer was needed.
Gradients and optimizer state are used in the same order again and again: there the farthest is the one just used, whose
buffer is not free yet. Of these the least recently used is evicted, and copies overlap with computation. All that is
waited for stands earlier in the program, so there is no deadlock, whatever the order in which a GPU gets to it.
Parameter buckets have host slots of their own; activations share theirs, and so do gradients where each is consumed as
soon as it is complete: there few or none go to the host. Buckets that live on disk have no host slot but a
place in a file, to which the same applies.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.perfmodel.offload.buffers import BUCKET_KINDS, BufferKey, ParamBuckets, kinds_with_own_host_slots
from llmb.perfmodel.offload.plan_memory import buffer_counts, disk_buckets
from llmb.perfmodel.offload.program import BEFORE_ALL, STAGED, Copy, Operation, Program
from llmb.perfmodel.offload.step_tasks import StepTask

NEVER = 1 << 60
LRU_KINDS = ("grad", "state")


class _CopyOut:
    """Copy to the host whose entry number is known only when the whole program is."""

    __slots__ = ("buffer", "entry", "key", "written")

    def __init__(self, key: BufferKey, buffer: int, written: int):
        self.key, self.buffer = key, buffer
        self.written = written  # entry of the compute stream that wrote it last
        self.entry = BEFORE_ALL


class ResidencySnapshot(NamedTuple):
    """Contents at a moment between two programs."""

    where: frozenset[tuple[BufferKey, int]]
    on_host: frozenset[BufferKey]
    host_slots: frozenset[tuple[BufferKey, int]]
    last_used: frozenset[tuple[BufferKey, int]]
    copied_out: frozenset[tuple[BufferKey, int]]
    free: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    free_host_slots: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    num_host_slots: tuple[tuple[str, int], ...]


Release = int | _CopyOut  # what must be done before a buffer is overwritten: a task, or a copy to the host


class Residency:
    """Contents of the device buffers from step to step."""

    def __init__(self, model: Model, plan: Plan):
        buckets = ParamBuckets(model)
        counts = zip(BUCKET_KINDS, (plan.resident_params, plan.resident_grads, plan.resident_states), strict=True)
        resident = {kind: evenly_spread(count, model.layers, buckets.count) for kind, count in counts}
        self.resident = {BufferKey(kind, bucket) for kind, chosen in resident.items() for bucket in chosen}
        self.buffers = buffer_counts(plan)
        self.where: dict[BufferKey, int] = {}
        for kind in BUCKET_KINDS:
            self.where |= {BufferKey(kind, bucket): index for index, bucket in enumerate(resident[kind])}
        self.free: dict[str, list[tuple[int, Release]]] = {
            kind: [(index, BEFORE_ALL) for index in range(len(resident.get(kind, ())), count)]
            for kind, count in self.buffers.items()
        }
        # Contents of which the host has a valid copy.
        self.on_host = {BufferKey("param", bucket) for bucket in range(buckets.count)} - self.resident
        self.host_slots: dict[BufferKey, int] = {}
        self.on_disk: set[BufferKey] = set()
        self.own_slot_kinds = kinds_with_own_host_slots(plan)
        for kind in self.own_slot_kinds:
            moving = [BufferKey(kind, bucket) for bucket in range(buckets.count)]
            moving = [key for key in moving if key not in self.resident]
            spread = evenly_spread(disk_buckets(plan).get(kind, 0), len(moving), len(moving))
            self.on_disk |= {moving[index] for index in spread}
            in_memory = (key for key in moving if key not in self.on_disk)
            self.host_slots |= {key: index for index, key in enumerate(in_memory)}
        self.last_used: dict[BufferKey, int] = {}  # entry of the compute stream
        self.copied_out: dict[BufferKey, int] = {}  # entry of the outbound stream
        self.free_host_slots: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.num_host_slots: dict[str, int] = defaultdict(int)

    def program(self, tasks: Sequence[StepTask], ahead: Iterable[StepTask] = ()) -> Program:
        """Compile the next step; what follows it only tells what will be needed again, and when."""
        return _Compiler(self, tasks, ahead).compile()

    def snapshot(self) -> ResidencySnapshot:
        """Return the state for `restore`; the same for the same contents, however they came about."""
        return ResidencySnapshot(
            frozenset(self.where.items()),
            frozenset(self.on_host),
            frozenset(self.host_slots.items()),
            frozenset(self.last_used.items()),
            frozenset(self.copied_out.items()),
            tuple((kind, tuple((at, _compute_entry(since)) for at, since in free)) for kind, free in self.free.items()),
            tuple((kind, tuple(slots)) for kind, slots in sorted(self.free_host_slots.items())),
            tuple(sorted(self.num_host_slots.items())),
        )

    def restore(self, state: ResidencySnapshot) -> None:
        """Continue from a snapshot."""
        self.where, self.on_host, self.host_slots = dict(state.where), set(state.on_host), dict(state.host_slots)
        self.last_used, self.copied_out = dict(state.last_used), dict(state.copied_out)
        self.free = {kind: list(free) for kind, free in state.free}
        self.free_host_slots = defaultdict(list, {kind: list(slots) for kind, slots in state.free_host_slots})
        self.num_host_slots = defaultdict(int, state.num_host_slots)


def evenly_spread(count: int, layers: int, buckets: int) -> list[int]:
    """Choose buckets, evenly among the layers, and vocabulary shards only when all layers are taken."""
    in_layers = min(count, layers)
    chosen = [layer for layer in range(layers) if (layer + 1) * in_layers // layers > layer * in_layers // layers]
    return chosen + list(range(layers, min(buckets, layers + count - in_layers)))


_Candidate = tuple[int, int, tuple[int, int, int], BufferKey]  # order: farthest next use, then least recently used


class _Compiler:
    """Program under construction."""

    def __init__(self, state: Residency, tasks: Sequence[StepTask], ahead: Iterable[StepTask]):
        self.state, self.tasks = state, tasks
        self.uses: dict[BufferKey, list[int]] = defaultdict(list)
        for entry, task in enumerate((*tasks, *ahead)):
            for key in (*task.reads, *task.makes, *task.changes):
                self.uses[key].append(entry)
        # Contents that may be evicted, the best first; an entry is stale once its content was used again or is gone.
        self.candidates: dict[str, list[_Candidate]] = defaultdict(list)
        for key in state.where:
            if key not in state.resident:
                self.candidates[key.kind].append(self._candidate(key, BEFORE_ALL))
        for heap in self.candidates.values():
            heapify(heap)
        self.first_copies_out: list[_CopyOut] = []  # of contents last used in the previous program
        self.copies_out: list[list[_CopyOut]] = [[] for _ in tasks]
        self.leaving: dict[BufferKey, _CopyOut] = {}  # copied out in this program and not changed since
        self.copies_in: list[list[tuple[BufferKey, int, Release]]] = []
        self.waits: list[list[Release]] = []
        self.buffers: list[dict[BufferKey, int]] = []

    def compile(self) -> Program:
        for entry, task in enumerate(self.tasks):
            self._place(entry, task)
        for entry, copy in enumerate(copy for copies in (self.first_copies_out, *self.copies_out) for copy in copies):
            copy.entry = entry
        program = self._with_entries()
        self._carry_over(program)
        return program

    def _place(self, entry: int, task: StepTask) -> None:
        """Find a buffer for every key that a task names."""
        named = (*task.reads, *task.changes, *task.makes)
        state, copies_in, waits = self.state, [], []
        for key in named:
            if key not in state.where:
                buffer, release = self._buffer(key.kind, named)
                state.where[key] = buffer
                if key in task.makes:
                    waits.append(release)
                elif key in state.on_host or key in self.leaving:
                    copies_in.append((key, buffer, release))
                else:
                    raise AssertionError(f"{task.kind} {task.layer} needs {key}, which is neither on device nor host")
        self.copies_in.append(copies_in)
        self.waits.append(waits)
        self.buffers.append({key: state.where[key] for key in named})
        for key in named:
            state.last_used[key] = entry
        for key in (*task.changes, *task.makes):
            state.on_host.discard(key)
            self.leaving.pop(key, None)
        for key in task.ends:
            self._forget(key, entry)
        for key in named:
            if key in state.where and key not in state.resident:
                heappush(self.candidates[key.kind], self._candidate(key, entry))

    def _buffer(self, kind: str, named: Sequence[BufferKey]) -> tuple[int, Release]:
        """Return a buffer of this kind, and what its last content waits for."""
        state = self.state
        if state.free[kind]:
            return state.free[kind].pop(0)
        evicted = self._next_eviction(kind, named)
        buffer = state.where.pop(evicted)
        used = state.last_used.get(evicted, BEFORE_ALL)
        if evicted in state.on_host or evicted in self.leaving:
            return buffer, used
        copy = self.leaving[evicted] = _CopyOut(evicted, buffer, used)
        (self.copies_out[used] if used >= 0 else self.first_copies_out).append(copy)
        return buffer, copy

    def _next_eviction(self, kind: str, named: Sequence[BufferKey]) -> BufferKey:
        """Take the content that goes next; those that the task names become candidates again after it."""
        state, heap = self.state, self.candidates[kind]
        while heap:
            _, last_used, _, key = heappop(heap)
            if key in state.where and last_used == state.last_used.get(key, BEFORE_ALL) and key not in named:
                return key
        raise ConfigError(f"the plan has {state.buffers[kind]} buffers for {kind}, fewer than one computation needs")

    def _candidate(self, key: BufferKey, entry: int) -> _Candidate:
        """Return the place of a content among evictions after an entry; ties are broken always the same way."""
        last_used = self.state.last_used.get(key, BEFORE_ALL)
        next_use = 0
        if key.kind not in LRU_KINDS:
            uses = self.uses[key]
            at = bisect_right(uses, entry)
            next_use = uses[at] if at < len(uses) else NEVER
        return -next_use, last_used, (-key.layer, -key.group, -key.chunk), key

    def _forget(self, key: BufferKey, entry: int) -> None:
        """Free the buffer of a content after its last use, unless it is resident."""
        state = self.state
        state.on_host.discard(key)
        self.leaving.pop(key, None)
        if key not in state.resident:
            state.free[key.kind].append((state.where.pop(key), entry))

    def _with_entries(self) -> Program:
        """Order all copies, each with the entries it waits for; assign host slots to what has none of its own."""
        state, operations = self.state, []
        first_copies_out = self._numbered(self.first_copies_out)
        inbound = 0
        for entry, task in enumerate(self.tasks):
            copies_in = []
            wait_inbound = wait_outbound = BEFORE_ALL
            for key, buffer, release in self.copies_in[entry]:
                compute, outbound = _waits(release)
                copied_out = state.copied_out.get(key, BEFORE_ALL)
                slot = STAGED if key in state.on_disk else state.host_slots[key]
                copies_in.append(Copy(key, buffer, slot, compute, max(outbound, copied_out), copied_out))
                wait_inbound = inbound
                inbound += 1
            for release in self.waits[entry]:
                wait_outbound = max(wait_outbound, _waits(release)[1])
            for key in task.ends:
                if key.kind not in state.own_slot_kinds and key in state.host_slots:
                    state.free_host_slots[key.kind].append((state.host_slots.pop(key), inbound - 1))
            copies_out = self._numbered(self.copies_out[entry])
            operations.append(
                Operation(task, self.buffers[entry], tuple(copies_in), copies_out, wait_inbound, wait_outbound)
            )
        return Program(first_copies_out, tuple(operations), dict(state.num_host_slots))

    def _numbered(self, copies_out: list[_CopyOut]) -> tuple[Copy, ...]:
        copies = []
        for copy in copies_out:
            host_slot, free_since = self._host_slot(copy.key)
            copies.append(Copy(copy.key, copy.buffer, host_slot, copy.written, free_since))
            self.state.copied_out[copy.key] = copy.entry
        return tuple(copies)

    def _host_slot(self, key: BufferKey) -> tuple[int, int]:
        """Return a host slot, and the entry of the inbound stream that must have read its last content."""
        state = self.state
        if key in state.on_disk:
            return STAGED, BEFORE_ALL
        if key in state.host_slots:
            return state.host_slots[key], BEFORE_ALL
        if state.free_host_slots[key.kind]:
            state.host_slots[key], since = state.free_host_slots[key.kind].pop()
            return state.host_slots[key], since
        state.host_slots[key] = state.num_host_slots[key.kind]
        state.num_host_slots[key.kind] += 1
        return state.host_slots[key], BEFORE_ALL

    def _carry_over(self, program: Program) -> None:
        """Count entries from the next program's first; what was copied out is on the host by then."""
        state, computed, copied_in, copied_out = (
            self.state, len(self.tasks), program.num_copies_in, program.num_copies_out,
        )  # fmt: skip
        state.on_host |= set(self.leaving)
        state.last_used = {
            key: max(entry - computed, BEFORE_ALL) for key, entry in state.last_used.items() if key in state.where
        }
        state.copied_out = {
            key: max(entry - copied_out, BEFORE_ALL) for key, entry in state.copied_out.items() if key in state.on_host
        }
        for kind, free in state.free.items():
            # By index, so that steps end alike: a task fills it next, which need not wait for another.
            state.free[kind] = sorted((buffer, _shifted(release, computed)) for buffer, release in free)
        for kind, slots in state.free_host_slots.items():
            state.free_host_slots[kind] = [(slot, max(since - copied_in, BEFORE_ALL)) for slot, since in slots]


def _waits(release: Release) -> tuple[int, int]:
    """Return the entries of the compute and of the outbound stream to wait for."""
    if isinstance(release, _CopyOut):
        return BEFORE_ALL, release.entry
    return release, BEFORE_ALL


def _compute_entry(release: Release) -> int:
    """Return the entry of the compute stream that a free buffer waits for."""
    assert not isinstance(release, _CopyOut)  # the buffer of an evicted content is taken at once, so none is free
    return release


def _shifted(release: Release, computed: int) -> int:
    return max(_compute_entry(release) - computed, BEFORE_ALL)
