"""Which piece is in which buffer of the device at each moment of a step: decided once, before the step is run.

    residency = Residency(model, plan)
    program = residency.program(work, ahead)     # ahead: the work behind it, as far as one wants to look
    residency.restore(residency.snapshot())      # equal snapshots and equal work have equal programs

Each kind of piece has a number of buffers. When a computation needs one more, the piece gives way whose next use is
farthest; if the host has no copy of it, it was sent home right behind its last use, long before its buffer was needed.
Gradients and optimizer state are met in the same order again and again: there the farthest is the one just used, whose
buffer is not free yet. Of these the one gives way that was used longest ago, and copies go on beside the computation.
All that anybody waits for stands earlier in the program, so there is no deadlock, whatever the order in which a GPU
gets to it. Units of weights have places at home of their own; activations share theirs, and so do gradients where each
is used up when it is done: there few or none go home.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.perfmodel.offload.buffers import OF_UNITS, Piece, Units, at_own_homes
from llmb.perfmodel.offload.plan_memory import buffers_of
from llmb.perfmodel.offload.program import BEFORE_ALL, Copy, Operation, Program
from llmb.perfmodel.offload.step_tasks import Work

NEVER = 1 << 60
OLDEST_FIRST = ("grad", "state")


class _Send:
    """A copy home, of which the place among all others is known only when the whole program is."""

    __slots__ = ("buffer", "entry", "piece", "written")

    def __init__(self, piece: Piece, buffer: int, written: int):
        self.piece, self.buffer = piece, buffer
        self.written = written  # entry of the compute lane that wrote it last
        self.entry = BEFORE_ALL


class Snapshot(NamedTuple):
    """The contents at a moment between two programs."""

    where: frozenset[tuple[Piece, int]]
    at_home: frozenset[Piece]
    homes: frozenset[tuple[Piece, int]]
    touched: frozenset[tuple[Piece, int]]
    sent: frozenset[tuple[Piece, int]]
    free: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    free_homes: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    made_homes: tuple[tuple[str, int], ...]


Release = int | _Send  # what a buffer waits for before it has a new content: a computation, or a copy home


class Residency:
    """The buffers' contents from step to step."""

    def __init__(self, model: Model, plan: Plan):
        units = Units(model)
        resident = {
            "param": spread(plan.resident_params, model.layers, units.count),
            "grad": spread(plan.resident_grads, model.layers, units.count),
            "state": spread(plan.resident_states, model.layers, units.count),
        }
        self.resident = {Piece(kind, unit) for kind, some in resident.items() for unit in some}
        self.buffers = buffers_of(plan)
        self.where: dict[Piece, int] = {}
        for kind in OF_UNITS:
            self.where |= {Piece(kind, unit): number for number, unit in enumerate(resident[kind])}
        self.free: dict[str, list[tuple[int, Release]]] = {
            kind: [(number, BEFORE_ALL) for number in range(len(resident.get(kind, ())), count)]
            for kind, count in self.buffers.items()
        }
        self.at_home = {Piece("param", unit) for unit in range(units.count)} - self.resident  # whose copy there is good
        self.homes: dict[Piece, int] = {}
        self.at_own_homes = at_own_homes(plan)
        for kind in self.at_own_homes:
            away = [unit for unit in range(units.count) if Piece(kind, unit) not in self.resident]
            self.homes |= {Piece(kind, unit): number for number, unit in enumerate(away)}
        self.touched: dict[Piece, int] = {}  # entry of the compute lane that used it last
        self.sent: dict[Piece, int] = {}  # entry of the outbound lane that took it home
        self.free_homes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.made_homes: dict[str, int] = defaultdict(int)

    def program(self, work: Sequence[Work], ahead: Iterable[Work] = ()) -> Program:
        """The next step's program; what follows it only tells what will be needed again, and when."""
        compiler = _Compiler(self, work, ahead)
        return compiler.compiled()

    def snapshot(self) -> Snapshot:
        """What `restore` comes back to; the same for the same contents, however they came about."""
        return Snapshot(
            frozenset(self.where.items()),
            frozenset(self.at_home),
            frozenset(self.homes.items()),
            frozenset(self.touched.items()),
            frozenset(self.sent.items()),
            tuple((kind, tuple((at, _computed(since)) for at, since in free)) for kind, free in self.free.items()),
            tuple((kind, tuple(homes)) for kind, homes in sorted(self.free_homes.items())),
            tuple(sorted(self.made_homes.items())),
        )

    def restore(self, found: Snapshot) -> None:
        """Go on from there."""
        self.where, self.at_home, self.homes = dict(found.where), set(found.at_home), dict(found.homes)
        self.touched, self.sent = dict(found.touched), dict(found.sent)
        self.free = {kind: list(free) for kind, free in found.free}
        self.free_homes = defaultdict(list, {kind: list(homes) for kind, homes in found.free_homes})
        self.made_homes = defaultdict(int, found.made_homes)


def spread(count: int, layers: int, units: int) -> list[int]:
    """So many units, evenly among the layers, and of the vocabulary's only when all layers are taken."""
    in_layers = min(count, layers)
    chosen = [layer for layer in range(layers) if (layer + 1) * in_layers // layers > layer * in_layers // layers]
    return chosen + list(range(layers, min(units, layers + count - in_layers)))


class _Compiler:
    """One program in the making."""

    def __init__(self, state: Residency, work: Sequence[Work], ahead: Iterable[Work]):
        self.state, self.work = state, work
        self.uses: dict[Piece, list[int]] = defaultdict(list)
        for entry, one in enumerate((*work, *ahead)):
            for piece in (*one.reads, *one.makes, *one.changes):
                self.uses[piece].append(entry)
        self.content: dict[str, set[Piece]] = defaultdict(set)  # of buffers that may be given to others
        for piece in state.where:
            if piece not in state.resident:
                self.content[piece.kind].add(piece)
        self.first_sends: list[_Send] = []  # of pieces last used in the program before
        self.sends: list[list[_Send]] = [[] for _ in work]
        self.going: dict[Piece, _Send] = {}  # sent home in this program and not changed since
        self.brings: list[list[tuple[Piece, int, Release]]] = []
        self.waits: list[list[Release]] = []
        self.buffers: list[dict[Piece, int]] = []

    def compiled(self) -> Program:
        for entry, one in enumerate(self.work):
            self._place(entry, one)
        for entry, send in enumerate(send for some in (self.first_sends, *self.sends) for send in some):
            send.entry = entry
        program = self._numbered()
        self._carry_over(program)
        return program

    def _place(self, entry: int, one: Work) -> None:
        """Find a buffer for every piece that a computation names."""
        named = (*one.reads, *one.changes, *one.makes)
        state, brings, waits = self.state, [], []
        for piece in named:
            if piece not in state.where:
                buffer, release = self._buffer(piece.kind, entry, named)
                state.where[piece] = buffer
                self.content[piece.kind].add(piece)
                if piece in one.makes:
                    waits.append(release)
                elif piece in state.at_home or piece in self.going:
                    brings.append((piece, buffer, release))
                else:
                    raise AssertionError(f"{one.kind} {one.layer} needs {piece}, which is nowhere")
        self.brings.append(brings)
        self.waits.append(waits)
        self.buffers.append({piece: state.where[piece] for piece in named})
        for piece in named:
            state.touched[piece] = entry
        for piece in (*one.changes, *one.makes):
            state.at_home.discard(piece)
            self.going.pop(piece, None)
        for piece in one.ends:
            self._forget(piece, entry)

    def _buffer(self, kind: str, entry: int, named: Sequence[Piece]) -> tuple[int, Release]:
        """A buffer of this kind, and what its last content waits for."""
        state = self.state
        if state.free[kind]:
            return state.free[kind].pop(0)
        others = (piece for piece in self.content[kind] if piece not in named)
        leaving = max(others, key=lambda piece: self._patience(piece, entry), default=None)
        if leaving is None:
            count = state.buffers[kind]
            raise ConfigError(f"the plan has {count} buffers for {kind}, fewer than one computation needs")
        buffer = state.where.pop(leaving)
        self.content[kind].discard(leaving)
        used = state.touched.get(leaving, BEFORE_ALL)
        if leaving in state.at_home or leaving in self.going:
            return buffer, used
        send = self.going[leaving] = _Send(leaving, buffer, used)
        (self.sends[used] if used >= 0 else self.first_sends).append(send)
        return buffer, send

    def _patience(self, piece: Piece, entry: int) -> tuple[int, int, Piece]:
        """How well a piece can do without its buffer; of equals always the same gives way."""
        rested = -self.state.touched.get(piece, BEFORE_ALL)
        if piece.kind in OLDEST_FIRST:
            return 0, rested, piece
        uses = self.uses[piece]
        at = bisect_right(uses, entry)
        return uses[at] if at < len(uses) else NEVER, rested, piece

    def _forget(self, piece: Piece, entry: int) -> None:
        """Its last use is done: the buffer is free again, unless it is the piece's own."""
        state = self.state
        state.at_home.discard(piece)
        self.going.pop(piece, None)
        if piece not in state.resident:
            self.content[piece.kind].discard(piece)
            state.free[piece.kind].append((state.where.pop(piece), entry))

    def _numbered(self) -> Program:
        """Copies in their order, each with the entries it waits for; places at home for what has none of its own."""
        state, operations = self.state, []
        first_sends = self._sends(self.first_sends)
        inbound = 0
        for entry, one in enumerate(self.work):
            brings = []
            wait_inbound = wait_outbound = BEFORE_ALL
            for piece, buffer, release in self.brings[entry]:
                compute, sent = _waits(release)
                sent = max(sent, state.sent.get(piece, BEFORE_ALL))
                brings.append(Copy(piece, buffer, state.homes[piece], compute, sent))
                wait_inbound = inbound
                inbound += 1
            for release in self.waits[entry]:
                wait_outbound = max(wait_outbound, _waits(release)[1])
            for piece in one.ends:
                if piece.kind not in state.at_own_homes and piece in state.homes:
                    state.free_homes[piece.kind].append((state.homes.pop(piece), inbound - 1))
            sends = self._sends(self.sends[entry])
            operations.append(Operation(one, self.buffers[entry], tuple(brings), sends, wait_inbound, wait_outbound))
        return Program(first_sends, tuple(operations), dict(state.made_homes))

    def _sends(self, sends: list[_Send]) -> tuple[Copy, ...]:
        copies = []
        for send in sends:
            home, free_since = self._home(send.piece)
            copies.append(Copy(send.piece, send.buffer, home, send.written, free_since))
            self.state.sent[send.piece] = send.entry
        return tuple(copies)

    def _home(self, piece: Piece) -> tuple[int, int]:
        """A place at home, and the entry of the inbound lane that must have read what was there."""
        state = self.state
        if piece in state.homes:
            return state.homes[piece], BEFORE_ALL
        if state.free_homes[piece.kind]:
            state.homes[piece], since = state.free_homes[piece.kind].pop()
            return state.homes[piece], since
        state.homes[piece] = state.made_homes[piece.kind]
        state.made_homes[piece.kind] += 1
        return state.homes[piece], BEFORE_ALL

    def _carry_over(self, program: Program) -> None:
        """Count from the next program's first entries; what is at home there is at home."""
        state, computed, brought, sent = self.state, len(self.work), program.brought, program.sent
        state.at_home |= set(self.going)
        touched, gone = state.touched.items(), state.sent.items()
        state.touched = {piece: max(entry - computed, BEFORE_ALL) for piece, entry in touched if piece in state.where}
        state.sent = {piece: max(entry - sent, BEFORE_ALL) for piece, entry in gone if piece in state.at_home}
        for kind, free in state.free.items():
            # By number, so that steps end alike: a computation fills it next, which need not wait for another.
            state.free[kind] = sorted((buffer, _shifted(release, computed)) for buffer, release in free)
        for kind, homes in state.free_homes.items():
            state.free_homes[kind] = [(home, max(since - brought, BEFORE_ALL)) for home, since in homes]


def _waits(release: Release) -> tuple[int, int]:
    """The entries of the compute and of the outbound lane."""
    if isinstance(release, _Send):
        return BEFORE_ALL, release.entry
    return release, BEFORE_ALL


def _computed(release: Release) -> int:
    """The entry of the compute lane that a free buffer waits for."""
    assert not isinstance(release, _Send)  # a sent piece's buffer is taken at once, so none is free
    return release


def _shifted(release: Release, computed: int) -> int:
    return max(_computed(release) - computed, BEFORE_ALL)
