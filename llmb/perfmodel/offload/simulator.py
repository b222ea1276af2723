"""A program on three lanes that wait for one another as a GPU's streams do: how long it takes, and what waits for what.

    simulated = simulate(model, plan, rates)     # a step in the middle of a long run
    simulated.step_s, simulated.compute_s, simulated.stretches

Of a step of many equal rounds only the first, one between and the last are gone through; the others are like the
second.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmb.config.offload_plan import FULL, Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import OF_UNITS, Piece, piece_bytes
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.residency import Residency
from llmb.perfmodel.offload.step_tasks import Work, beginning, step_work
from llmb.perfmodel.offload.stream_timeline import Lane, Phase, Stretch
from llmb.perfmodel.offload.task_durations import Durations

SHOWN_ROUNDS = 3
PHASES: dict[str, Phase] = {
    "embedding": "embedding", "embedding_backward": "embedding",
    "forward": "forward", "head": "head", "backward": "backward", "update": "update",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A step in the middle of a run."""

    step_s: float
    compute_s: float  # of these, in which the compute lane was busy
    inbound_s: float
    outbound_s: float
    inbound_bytes: int
    outbound_bytes: int
    hardware_flops: float
    home_slots: dict[str, int]  # places that gradients and activations need at home, by kind
    stretches: tuple[Stretch, ...]  # of the rounds gone through, if asked for


class Lanes:
    """The clock of each lane, and when each entry of the current program was done."""

    def __init__(self, durations: Durations, sizes: dict[str, int]):
        self.durations, self.sizes, self.rates = durations, sizes, durations.rates
        self.now = {"compute": 0.0, "inbound": 0.0, "outbound": 0.0}
        self.done: dict[str, list[float]] = {"compute": [], "inbound": [], "outbound": []}
        self.base = dict.fromkeys(self.now, 0)

    def run(self, program: Program, step: int = 0) -> Iterator[Stretch]:
        """Every entry of a program, in order, with its beginning and end."""
        self.base = {lane: len(done) for lane, done in self.done.items()}
        for copy in program.first_sends:
            yield self._copy("outbound", "inbound", self.rates.link_out_gbs, copy, program.operations[0].work, step)
        for operation in program.operations:
            for copy in operation.brings:
                yield self._copy("inbound", "outbound", self.rates.link_in_gbs, copy, operation.work, step)
            yield from self._compute(operation, step)
            for copy in operation.sends:
                yield self._copy("outbound", "inbound", self.rates.link_out_gbs, copy, operation.work, step)

    def _compute(self, operation: Operation, step: int) -> Iterator[Stretch]:
        """A computation; what it has to compute again first is shown apart."""
        work, cost = operation.work, self.durations.cost(operation.work)
        ready = max(self._done("inbound", operation.wait_inbound), self._done("outbound", operation.wait_outbound))
        start, end = self._take("compute", ready, self.durations.seconds_of(cost))
        if work.kind == "backward" and work.level != FULL and work.chunk is not None:
            again = self.durations.recompute(work.chunk, work.level)
            middle = start + self.durations.seconds_of(again)
            yield stretch_of(
                "compute", "recompute", start, middle, work, step, self.durations.model.layers, flops=again.flops
            )
            yield stretch_of(
                "compute",
                work.kind,
                middle,
                end,
                work,
                step,
                self.durations.model.layers,
                flops=cost.flops - again.flops,
            )
        else:
            yield stretch_of(
                "compute", work.kind, start, end, work, step, self.durations.model.layers, flops=cost.flops
            )

    def _copy(self, lane: Lane, other: Lane, gbs: float, copy: Copy, work: Work, step: int) -> Stretch:
        ready = max(self._done("compute", copy.wait_compute), self._done(other, copy.wait_other))
        size = self.sizes[copy.piece.kind]
        busy = self.now[other] > max(ready, self.now[lane])  # the link is slower when both ways are taken
        start, end = self._take(lane, ready, size / (self.rates.link_both_gbs if busy else gbs) / 1e9)
        return stretch_of(
            lane, copy.piece.kind, start, end, work, step, self.durations.model.layers, size, piece=copy.piece
        )

    def _done(self, lane: Lane, entry: int) -> float:
        place = self.base[lane] + entry
        return self.done[lane][place] if place >= 0 else 0.0

    def _take(self, lane: Lane, ready: float, seconds: float) -> tuple[float, float]:
        start = max(self.now[lane], ready)
        self.now[lane] = start + seconds
        self.done[lane].append(self.now[lane])
        return start, self.now[lane]


def stretch_of(
    lane: Lane, name: str, start: float, end: float, work: Work, step: int, layers: int,
    size: int = 0, flops: float = 0.0, piece: Piece | None = None,
) -> Stretch:  # fmt: skip
    """An entry of a lane, predicted or measured. A unit of the vocabulary has no layer."""
    layer, chunk = work.layer, work.chunk
    if piece is not None and piece.kind in OF_UNITS:
        layer, chunk = piece.layer, None
    return Stretch(
        lane=lane, name=name, start=start, end=end, step=step, phase=PHASES[work.kind], round=work.round,
        layer=layer if 0 <= layer < layers else None,
        group=chunk.group if chunk else None, chunk=chunk.number if chunk else None, flops=flops, bytes=size,
    )  # fmt: skip


def simulate(model: Model, plan: Plan, rates: Rates, shown: bool = False) -> Simulated:
    """The third step, which is like all behind it: the first finds no gradients that wait, the second no state.

    These two have one round, which leaves the same behind as many.
    """
    rounds = min(plan.rounds, SHOWN_ROUNDS)
    short, shortest = plan, plan
    if plan.rounds > SHOWN_ROUNDS:
        short = replace(plan, gbs=SHOWN_ROUNDS * plan.groups_per_round * plan.seqs_per_group)
    if plan.rounds > 1:
        shortest = replace(plan, gbs=plan.groups_per_round * plan.seqs_per_group)
    residency, lanes = Residency(model, short), Lanes(Durations(model, short, rates), piece_bytes(model, short))
    steady = step_work(model, short, beginning(plan, 2))
    for step in (0, 1):
        for _ in lanes.run(residency.program(step_work(model, shortest, beginning(plan, step)), steady)):
            pass
    start = lanes.now["compute"]
    program = residency.program(steady, steady)
    stretches = list(lanes.run(program))
    end = lanes.now["compute"]
    per_round = _Sums(rounds)
    for stretch in stretches:
        per_round.add(stretch)
    times = plan.rounds - rounds  # how often the round between is missing
    middle = per_round.ends[1] - per_round.ends[0] if rounds > 1 else 0.0
    if shown:  # one more, so that the border between two steps can be seen
        stretches += lanes.run(residency.program(steady, steady), step=1)
    return Simulated(
        step_s=end - start + times * middle,
        compute_s=per_round.total("compute", times),
        inbound_s=per_round.total("inbound", times),
        outbound_s=per_round.total("outbound", times),
        inbound_bytes=int(per_round.total("inbound_bytes", times)),
        outbound_bytes=int(per_round.total("outbound_bytes", times)),
        hardware_flops=per_round.total("flops", times),
        home_slots=program.homes,
        stretches=tuple(_since(stretch, start) for stretch in stretches) if shown else (),
    )


def _since(stretch: Stretch, start: float) -> Stretch:
    return replace(stretch, start=stretch.start - start, end=stretch.end - start)


class _Sums:
    """What each round takes, by name; and when its last computation was done."""

    def __init__(self, rounds: int):
        self.sums: list[dict[str, float]] = [{} for _ in range(rounds)]
        self.ends = [0.0] * rounds

    def add(self, stretch: Stretch) -> None:
        assert stretch.round is not None
        sums = self.sums[stretch.round]
        seconds = stretch.end - stretch.start
        for name, value in (
            (stretch.lane, seconds), (f"{stretch.lane}_bytes", stretch.bytes), ("flops", stretch.flops),
        ):  # fmt: skip
            sums[name] = sums.get(name, 0.0) + value
        if stretch.lane == "compute":
            self.ends[stretch.round] = stretch.end

    def total(self, name: str, times: int) -> float:
        found = [sums.get(name, 0.0) for sums in self.sums]
        return sum(found) + (times * found[1] if times else 0.0)
