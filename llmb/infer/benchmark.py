"""The whole serving job: read or draw the requests, open the engine, warm it up, measure, record.

    serve(config, record)      # config: a spec.RunConfig; record: a rank.Record

Warm-up goes through the same phase as what is measured, with prompts of the same lengths and other tokens. There are as
many as the engine computes at once, so that every size of batch is seen; their answers are cut where all of them have
been computed together for a while, since steps beyond that are alike.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from llmb.errors import ConfigError
from llmb.events import ServingFacts
from llmb.infer.energy import Energy, EnergyMeter
from llmb.infer.engine import Engine
from llmb.infer.journal import Journal
from llmb.infer.load import Load, Seat, load_of, seat_of
from llmb.infer.phase import Phase
from llmb.infer.prompts import Draw, Prompt, measured_prompts, terms_of
from llmb.infer.serve import open_engine
from llmb.infer.shortage import check_room, naming_shortage
from llmb.infer.trace import Trace
from llmb.rank.memory import peak_bytes
from llmb.rank.place import Place, join_ranks
from llmb.rank.provenance import run_started
from llmb.rank.record import Record
from llmb.spec import Inference, RunConfig

COUNTS = ("isl", "osl", "num_requests", "max_batch_size", "max_num_tokens", "block_tokens")
SETTLED = 32  # steps of the warm-up in which all of its requests are computed together


def serve(config: RunConfig, record: Record) -> None:
    """Serve every request the configuration asks for, and record it; raises where the run cannot go on."""
    work = served_workload(config)
    terms = terms_of(config.model, work.weights)
    draw = Draw(work.seed, terms)
    prompts = measured_prompts(work, terms, draw)
    check_steps(work, prompts)
    place = join_ranks(config, "llmb.infer")
    trace = Trace(record.path.parent, config.profile, place) if config.profile.profile else None
    record.add(run_started(place))
    if place.rank == 0 and len(prompts) < work.num_requests:
        print(f"{work.dataset} has {len(prompts)} requests, fewer than num_requests={work.num_requests}", flush=True)
    with naming_shortage(place.device, config):
        engine = open_engine(config, place)
        check_room(config, engine.load.blocks, prompts)
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
            kv_blocks=engine.load.blocks,
            block_tokens=work.block_tokens,
            peak_memory_bytes=peak_bytes(place.device),
            warmup_requests=len(warmup.prompts),
            warmup_s=warmup_s,
            energy_joules=energy.joules,
            power_joules=energy.power_joules,
            mean_power_w=energy.mean_power_w,
            energy_note=energy.note,
        )
    )


def served_workload(config: RunConfig) -> Inference:
    """The workload, whose numbers can be served; a ConfigError names those that cannot."""
    work = config.workload
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.infer is the native engine")
    if not isinstance(work, Inference):
        raise ConfigError(f"a workload of kind {work.kind}: python -m llmb.infer runs kind inference")
    for name in COUNTS:
        if getattr(work, name) < 1:
            raise ConfigError(f"workload.{name}={getattr(work, name)}: must be at least 1")
    for name in ("isl_spread", "osl_spread"):
        if getattr(work, name) < 0:
            raise ConfigError(f"workload.{name}={getattr(work, name):g}: must be at least 0")
    if not 0 < work.kv_fraction <= 1:
        raise ConfigError(f"workload.kv_fraction={work.kv_fraction:g}: must be above 0 and at most 1")
    if config.profile.gpu_metrics:
        raise ConfigError("the native serving engine does not run gpu_metrics=true (needs Nsight Systems)")
    return work


def check_steps(work: Inference, prompts: Sequence[Prompt]) -> None:
    """Whether a step holds every prompt, where prompts are not cut."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if not work.chunked_prefill and longest > work.max_num_tokens:
        raise ConfigError(
            f"a prompt of {longest} tokens does not fit into a step of max_num_tokens={work.max_num_tokens}; "
            f"raise it to {longest} or set chunked_prefill=true"
        )


def warmup_load(work: Inference, load: Load, parts: int, cache_tokens: int, draw: Draw) -> Load:
    """This driver's share of the warm-up: as many requests as are computed at once, unless their number is given."""
    if work.warmup_requests is not None:
        count = -(-work.warmup_requests // parts)
    else:
        fitting = cache_tokens * len(load.prompts) // max(1, sum(prompt.total for _, prompt in load.prompts))
        count = min(load.in_flight, work.max_batch_size, max(1, fitting))
    lengths = [(len(prompt.tokens), prompt.output_tokens) for _, prompt in load.prompts]
    chosen = [lengths[i % len(lengths)] for i in range(count)] if lengths else []
    all_begun = -(-sum(inputs for inputs, _ in chosen) // work.max_num_tokens)  # steps until the last has begun
    prompts = draw.prompts((inputs, min(outputs, all_begun + SETTLED)) for inputs, outputs in chosen)
    return load_of(prompts, load.in_flight)


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
