"""The whole serving job: read or draw the requests, open the engine, warm it up, measure, record.

    serve(config, record)      # config: a spec.RunConfig; record: a rank.Record

Warm-up goes through the same kind of phase as what is measured, and is recorded apart. All ranks begin a phase at the
same moment, so that their times are on one clock.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from llmb.config.spec import Inference, RunConfig
from llmb.events import ServingFacts
from llmb.runtime.process_memory import peak_bytes
from llmb.runtime.provenance import run_started
from llmb.runtime.rank_info import Place, join_ranks
from llmb.runtime.recorder import Record
from llmb.serve.benchmark.arrivals import Load, Seat, load_of, seat_of, warmup_load
from llmb.serve.benchmark.benchmark_phase import Phase
from llmb.serve.benchmark.energy import Energy, EnergyMeter
from llmb.serve.benchmark.engine_facts import engine_facts
from llmb.serve.benchmark.prompts import Draw, measured_prompts, terms_of
from llmb.serve.benchmark.request_recorder import Journal
from llmb.serve.benchmark.step_trace import Trace
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import open_engine
from llmb.serve.serve_oom import check_room, naming_shortage
from llmb.serve.serve_support import check_steps, supported_workload


def serve(config: RunConfig, record: Record) -> None:
    """Serve every request the configuration asks for, and record it; raises where the run cannot go on."""
    work = supported_workload(config)
    terms = terms_of(config.model, work.weights)
    draw = Draw(work.seed, terms)
    prompts = measured_prompts(work, terms, draw)
    check_steps(work, prompts)
    place = join_ranks(config, "llmb.serve")
    trace = Trace(record.path.parent, config.profile, place) if config.profile.profile else None
    record.add(run_started(place))
    if place.rank == 0 and len(prompts) < work.num_requests:
        print(f"{work.dataset} has {len(prompts)} requests, fewer than num_requests={work.num_requests}", flush=True)
    with naming_shortage(place.device, config):
        engine = open_engine(config, place, longest=max(prompt.total for prompt in prompts))
        record.add(engine_facts(engine, config, place.rank))
        check_room(config, place.device, engine.load.blocks, prompts)
        seat = seat_of(place.rank, config.parallel.tp, work.attention_dp)
        load = load_of(prompts, work.concurrency).share(seat.index, seat.parts)
        warmup = warmup_load(work, load, seat.parts, engine.load.blocks * work.block_tokens, draw)
        bench = Bench(work, terms.eos, engine, place, seat, record)
        warmup_s = bench.warm_up(warmup)
        energy = bench.measure(load, trace)
    record.add(
        ServingFacts(
            rank=place.rank,
            requests=len(prompts),
            peak_memory_bytes=peak_bytes(place.device),
            warmup_requests=len(warmup.prompts),
            warmup_s=warmup_s,
            energy_joules=energy.joules,
            power_joules=energy.power_joules,
            mean_power_w=energy.mean_power_w,
            energy_note=energy.note,
        )
    )


@dataclass(frozen=True)
class Bench:
    """An open engine, and who drives it."""

    work: Inference
    eos: frozenset[int]
    engine: Engine
    place: Place
    seat: Seat
    record: Record

    def warm_up(self, load: Load) -> float | None:
        """Seconds it took; none where there is no warm-up."""
        if self.work.warmup_requests == 0:
            return None
        journal = self._journal(load, warmup=True)
        self._together()
        seconds = Phase(self.engine, self.work, self.eos, load, journal).run()
        if journal is not None:
            journal.write_all()
        return seconds

    def measure(self, load: Load, trace: Trace | None) -> Energy:
        """Run what counts; what this rank's device consumed."""
        journal = self._journal(load, warmup=False)
        with uncollected(), EnergyMeter(self.place.device) as meter:
            self._together()
            Phase(self.engine, self.work, self.eos, load, journal, trace).run()
        if trace is not None:
            trace.close()
        if journal is not None:
            journal.write_all()
        return meter.energy

    def _journal(self, load: Load, warmup: bool) -> Journal | None:
        return Journal(self.record, len(load.prompts), warmup) if self.seat.records else None

    def _together(self) -> None:
        """All ranks begin at the same moment."""
        if self.place.world_size > 1:
            dist.barrier()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without pauses to look for cycles of garbage, which millions of live tokens would make long; there are none."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
