"""The serving benchmark: read or generate the requests, build the engine, warm it up, measure, record.

    serve(config, events)      # config: a spec.RunConfig; events: a runtime.EventRecorder

The warm-up runs through the same kind of phase as the measurement and is recorded separately. All ranks begin a phase
at the same moment, so that their times are on one clock.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from llmb.config.spec import Inference, RunConfig
from llmb.events import ServingFacts
from llmb.runtime.gpu_sampler import GpuSampler
from llmb.runtime.process_memory import peak_bytes
from llmb.runtime.provenance import run_started
from llmb.runtime.rank_info import RankInfo, init_distributed
from llmb.runtime.recorder import EventRecorder
from llmb.serve.benchmark.benchmark_phase import BenchmarkPhase
from llmb.serve.benchmark.draft_speedup import plain_engine, tpot_ms
from llmb.serve.benchmark.energy import Energy, EnergyMeter
from llmb.serve.benchmark.engine_facts import engine_facts
from llmb.serve.benchmark.prompts import PromptSampler, measured_prompts, model_info
from llmb.serve.benchmark.request_load import (
    DataParallelShard,
    RequestLoad,
    data_parallel_shard,
    measured_load,
    warmup_load,
)
from llmb.serve.benchmark.request_recorder import RequestRecorder
from llmb.serve.benchmark.step_trace import StepTrace
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import build_engine
from llmb.serve.serve_oom import check_cache_capacity, report_oom
from llmb.serve.serve_support import check_steps, device_fallbacks, supported_workload
from llmb.serve.speculative.speculative_runner import SpeculativeRunner


def serve(config: RunConfig, events: EventRecorder) -> None:
    """Serve and record every request of the configuration; raise if the run cannot continue."""
    work = supported_workload(config)
    info = model_info(config.model, work.weights)
    sampler = PromptSampler(work.seed, info)
    prompts = measured_prompts(work, info, sampler)
    check_steps(work, prompts)
    rank_info = init_distributed(config, "llmb.serve")
    rank, device = rank_info.rank, rank_info.device
    trace = StepTrace(events.path.parent, config.profile, rank_info) if config.profile.profile else None
    events.add(run_started(rank_info, device_fallbacks(config, device)))
    if rank == 0 and len(prompts) < work.num_requests:
        print(f"{work.dataset} has {len(prompts)} requests, fewer than num_requests={work.num_requests}", flush=True)
    with report_oom(device, config), GpuSampler(events, device, measured=False) as gpu_sampler:
        engine = build_engine(config, rank_info, max_seq_len=max(prompt.num_tokens for prompt in prompts))
        events.add(engine_facts(engine, config, rank))
        check_cache_capacity(config, device, engine.stats.blocks, prompts)
        shard = data_parallel_shard(rank, config.parallel.tp, work.attention_dp)
        load = measured_load(work, prompts).shard(shard.index, shard.size)
        warmup = warmup_load(work, load, shard.size, engine.stats.blocks * work.block_tokens, sampler)
        benchmark = ServingBenchmark(work, info.eos, engine, rank_info, shard, events)
        warmup_s = benchmark.warm_up(warmup)
        draft_tpots = benchmark.compare_drafts(load, sampler)
        energy = benchmark.measure(load, trace, EnergyMeter(gpu_sampler))
    events.add(
        ServingFacts(
            rank=rank,
            requests=len(prompts),
            peak_memory_bytes=peak_bytes(device),
            warmup_requests=len(warmup.prompts),
            warmup_s=warmup_s,
            energy_joules=energy.joules,
            power_joules=energy.power_joules,
            mean_power_w=energy.mean_power_w,
            energy_note=energy.note,
            **draft_tpots,
            **draft_counts(engine),
        )
    )


@dataclass(frozen=True)
class ServingBenchmark:
    """A built engine, the rank that drives it, and its shard of the requests."""

    work: Inference
    eos: frozenset[int]
    engine: Engine
    rank_info: RankInfo
    shard: DataParallelShard
    events: EventRecorder

    def warm_up(self, load: RequestLoad) -> float | None:
        """Run the warm-up; return its seconds, or None if there is none."""
        if self.work.warmup_requests == 0:
            return None
        recorder = self._recorder(load, warmup=True)
        self._barrier()
        seconds = BenchmarkPhase(self.engine, self.work, self.eos, load, recorder).run()
        if recorder is not None:
            recorder.write_all()
        return seconds

    def compare_drafts(self, load: RequestLoad, sampler: PromptSampler) -> dict[str, Any]:
        """Decode one batch of requests of the measured lengths without drafts, then with; empty if the run has none."""
        engine, work = self.engine, self.work
        if not isinstance(engine.runner, SpeculativeRunner):
            return {}
        lengths = [(len(prompt.tokens), prompt.output_tokens) for _, prompt in load.prompts]
        prompts = sampler.prompts(lengths[: min(load.concurrency, work.max_batch_size)])
        engines = {"plain_tpot_ms": plain_engine(engine), "drafted_tpot_ms": engine}
        times = {name: tpot_ms(engine, work, self.eos, prompts) for name, engine in engines.items()}
        engine.runner.counts.reset()
        return times

    def measure(self, load: RequestLoad, trace: StepTrace | None, meter: EnergyMeter) -> Energy:
        """Run the measured phase; return the energy of this rank's device."""
        recorder = self._recorder(load, warmup=False)
        with gc_disabled(), meter:
            self._barrier()
            BenchmarkPhase(self.engine, self.work, self.eos, load, recorder, trace).run()
        if trace is not None:
            trace.close()
        if recorder is not None:
            recorder.write_all()
        return meter.energy

    def _recorder(self, load: RequestLoad, warmup: bool) -> RequestRecorder | None:
        return RequestRecorder(self.events, len(load.prompts), warmup) if self.shard.records else None

    def _barrier(self) -> None:
        if self.rank_info.world_size > 1:
            dist.barrier()


def draft_counts(engine: Engine) -> dict[str, Any]:
    """Return what was accepted since the warm-up, as fields of ServingFacts; empty without drafts."""
    if not isinstance(engine.runner, SpeculativeRunner):
        return {}
    counts = engine.runner.counts
    trials, accepted = tuple(counts.trials), tuple(counts.accepted)
    return {"verifications": counts.verifications, "draft_trials": trials, "draft_accepted": accepted}


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, whose pauses millions of live tokens would make long; there are no cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
